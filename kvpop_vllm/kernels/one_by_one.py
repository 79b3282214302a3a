"""Chunks that an implementation runs one after another."""

from collections.abc import Callable
from dataclasses import replace

import torch


def one_by_one(run: Callable) -> Callable:
    """Return an implementation of ``prefill_chunk`` that runs the chunks one after another.

    Args:
        run: function ``(q, k, v, pages, row, start, budgets, *, rule, scale, gate_scores, prefix, keys, sink_logits)``
            that runs the chunk of one request, whose pages are ``row [H, P]`` and budgets ``[H]``.
    """

    def run_all(
        q, k, v, pages, page_table, chunks, *, rule, scale, gate_scores=None, prefix=None, keys=None, sink_logits=None
    ):
        outputs, first = [], 0
        for r, (start, count, window) in enumerate(zip(chunks.starts, chunks.lengths, chunks.windows, strict=True)):
            cut, row = slice(first, first + count), slice(r, r + 1)
            ahead = None
            if prefix is not None and prefix.tokens[r]:
                ahead = prefix.of(row)
            part = run(
                q[cut],
                k[cut],
                v[cut],
                pages,
                page_table[r],
                start,
                chunks.budgets[r],
                rule=rule if window == rule.window else replace(rule, window=window),
                scale=scale,
                gate_scores=None if gate_scores is None else gate_scores[cut],
                prefix=ahead,
                keys=None if keys is None else keys[row],
                sink_logits=sink_logits,
            )
            outputs.append(part)
            first += count
        return outputs[0] if len(outputs) == 1 else tuple(torch.cat(pair) for pair in zip(*outputs, strict=True))

    run_all.__doc__ = run.__doc__
    return run_all
