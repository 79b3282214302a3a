"""Checks of decoding in a CUDA graph: tokens of captured passes of a tiny model.

The passes run through `KVpopCache` and through transformers' static cache. Caches that are written rather
than filled are checked where they are made, in gpu_generation.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu import Bench, ops_take
from gpu_caches import Decoding, full_cache, static_cache, tiny

from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import random_prompt

PROMPTS, NEW = (40, 33), 40
"""Prompts of the tiny model and new tokens; replays reach its B of 64, in one row before the other."""
SMALL_PROMPTS, SMALL_NEW = (10, 9), 5
"""Prompts and new tokens with interpreted kernels, for B of 12."""


def kvpop_right(bench: Bench) -> Iterator[dict]:
    """Check that captured passes give the tokens of ``generate()`` and retain the same tokens.

    The caches fill up during replays, one row's after the other's. Interpreted passes are compared with
    ``generate()`` on a CPU.
    """
    new = SMALL_NEW if bench.small else NEW
    with tiny(bench) as (model, scorer, budget):
        prompts, mask = padded(bench)
        lengths = mask.sum(1).tolist()
        assert len(set(lengths)) == 2 and max(lengths) + 1 < budget < min(lengths) + new - 1, "no replay fills a cache"
        plain, cache = (KVpopCache(model, "kvpop", scorer=scorer) for _ in range(2))
        options = dict(attention_mask=mask, past_key_values=plain, max_new_tokens=new, do_sample=False)
        expected = model.generate(prompts, **options)[:, prompts.shape[1] :].tolist()
        with ops_take("triton" if bench.small else None) as calls:
            tokens = greedy(bench, model, cache, prompts, new, mask)
        slow = "reference" in {implementation for _, implementation in calls}
        assert {op for op, _ in calls} == {"prefill_chunk", "decode_step"} and not slow, f"kernels: {sorted(calls)}"
        if bench.device == "cuda":  # without a graph, passes are counted already
            cache.replayed(new - 2)
    assert tokens == expected, f"captured passes give {tokens}, generate() {expected}"
    assert all(torch.equal(cache.held(row), plain.held(row)) for row in range(2)), "other tokens are held"
    yield bench.row("tokens that differ", 0, "count")


def dense_right(bench: Bench) -> Iterator[dict]:
    """Check that captured passes give the tokens of single passes.

    A full cache must also give the same logits for the same token with and without a mask.
    """
    new, logits = 12, []
    with tiny(bench) as (model, *_):
        prompts = padded(bench)[0]
        length = prompts.shape[1]
        expected = greedy(bench, model, static_cache(model, 2, length + new)[0], prompts, new, one_by_one=True)
        tokens = greedy(bench, model, static_cache(model, 2, length + new)[0], prompts, new)
        cache, before = full_cache(model, 2, length)
        for options in ({}, {"attention_mask": {"full_attention": None}}):
            decoding = Decoding(model, cache, prompts[:, -1:], before, **options)
            replay = decoding.captured(bench)
            decoding.tokens.copy_(prompts[:, -1:])  # the previous pass may differ by rounding
            replay()
            logits.append(decoding.logits.float().cpu())
            del replay  # must not be freed before it is done
    assert tokens == expected, f"captured passes give {tokens}, passes one by one {expected}"
    error = float((logits[0] - logits[1]).abs().max())
    assert error < (0.2 if bench.dtype == torch.bfloat16 else 1e-3), f"without a mask logits differ by {error:.3g}"
    yield bench.row("tokens that differ", 0, "count")


def padded(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two prompts ``[2, L]``, the shorter one padded on its left, and a mask of their tokens."""
    lengths = SMALL_PROMPTS if bench.small else PROMPTS
    rows = [[0] * (max(lengths) - n) + random_prompt(n, seed=i) for i, n in enumerate(lengths)]
    mask = [[0] * (max(lengths) - n) + [1] * n for n in lengths]
    return torch.tensor(rows, device=bench.device), torch.tensor(mask, device=bench.device)


def greedy(
    bench: Bench, model, cache, prompts: torch.Tensor, new: int, mask=None, one_by_one: bool = False
) -> list[list[int]]:
    """Return ``new`` greedy tokens of every row.

    The first comes from the prompt's pass, the second from a pass, the others from replays of a pass.

    Args:
        bench: device and dtype.
        model: the model.
        cache: its empty cache.
        prompts: ``[R, L]``.
        new: number of tokens.
        mask: ``[R, L]``, the columns of the prompts that are tokens; None for all.
        one_by_one: True to run passes without a graph.
    """
    options = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)  # as in generate()
    with torch.no_grad():
        first = model(input_ids=prompts, attention_mask=mask, **options).logits[:, -1:].argmax(-1)
    decoding, before = Decoding(model, cache, first), list(getattr(cache, "lengths", []))
    if one_by_one:
        decoding.step()
        replay = decoding.step
    else:
        replay = decoding.captured(bench)
        counted = before and bench.device == "cuda" and cache.lengths != [seen + 1 for seen in before]
        assert not counted, "a pass that was recorded was counted"
    tokens = [first, decoding.tokens.clone()]
    for _ in range(new - 2):
        replay()
        tokens.append(decoding.tokens.clone())
    return torch.cat(tokens, 1).tolist()
