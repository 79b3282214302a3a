"""Decoding in a graph is right: tokens of captured passes, through `KVpopCache` and transformers' static cache, of a tiny model.

That caches which are written rather than filled go on is checked where they are made, in gpu_generation.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu import Bench, ops_take
from gpu_caches import Decoding, full_cache, static_cache, tiny

from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import random_prompt

PROMPTS, NEW = (40, 33), 40
"""Of the tiny model, whose B of 64 is so reached in replays, by one row before the other."""
SMALL_PROMPTS, SMALL_NEW = (10, 9), 5
"""Where kernels are interpreted, B 12."""


def kvpop_right(bench: Bench) -> Iterator[dict]:
    """Tokens of captured passes are those of ``generate()``, and the same tokens are held; caches fill up in replays,
    one row's after the other's. Interpreted passes are held against ``generate()`` as a CPU does it."""
    new = SMALL_NEW if bench.small else NEW
    with tiny(bench) as (model, scorer, budget):
        prompts, mask = padded(bench)
        lengths = mask.sum(1).tolist()
        assert len(set(lengths)) == 2 and max(lengths) + 1 < budget < min(lengths) + new - 1, "no replay fills a cache"
        plain, cache = (KVpopCache(model, "kvpop", scorer=scorer) for _ in range(2))
        told = dict(attention_mask=mask, past_key_values=plain, max_new_tokens=new, do_sample=False)
        out = model.generate(prompts, **told)
        with ops_take("triton" if bench.small else None) as chose:
            found = greedy(bench, model, cache, prompts, new, mask)
        slow = {(op, taken) for op, taken in chose if taken == "reference"}
        assert {op for op, _ in chose} == {"prefill_chunk", "decode_step"} and not slow, f"kernels: {sorted(chose)}"
        after(cache, new - 2, bench)
    expected = out[:, prompts.shape[1] :].tolist()
    assert found == expected, f"captured passes give {found}, generate() {expected}"
    assert all(torch.equal(cache.held(row), plain.held(row)) for row in range(2)), "other tokens are held"
    yield bench.row("tokens that differ", 0, "count")


def dense_right(bench: Bench) -> Iterator[dict]:
    """Tokens of captured passes are those of passes one by one; and without a mask a full cache gives the same logits
    for the same token."""
    new, logits = 12, []
    with tiny(bench) as (model, *_):
        prompts = padded(bench)[0]
        length = prompts.shape[1]
        expected = greedy(bench, model, static_cache(model, 2, length + new)[0], prompts, new, one_by_one=True)
        found = greedy(bench, model, static_cache(model, 2, length + new)[0], prompts, new)
        cache, before = full_cache(model, 2, length)
        for options in ({}, {"attention_mask": {"full_attention": None}}):
            decoding = Decoding(model, cache, prompts[:, -1:], before, **options)
            replay = decoding.captured(bench)
            decoding.tokens.copy_(prompts[:, -1:])  # what the pass before chose may differ by a rounding
            replay()
            logits.append(decoding.logits.float().cpu())
            del replay  # not before it is done
    assert found == expected, f"captured passes give {found}, passes one by one {expected}"
    error = float((logits[0] - logits[1]).abs().max())
    assert error < (0.2 if bench.dtype == torch.bfloat16 else 1e-3), f"without a mask logits differ by {error:.3g}"
    yield bench.row("tokens that differ", 0, "count")


def padded(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts ``[2, L]``, the shorter one with pads on its left, and which columns are tokens."""
    lengths = SMALL_PROMPTS if bench.small else PROMPTS
    rows = [[0] * (max(lengths) - n) + random_prompt(n, seed=i) for i, n in enumerate(lengths)]
    mask = [[0] * (max(lengths) - n) + [1] * n for n in lengths]
    return torch.tensor(rows, device=bench.device), torch.tensor(mask, device=bench.device)


def greedy(
    bench: Bench, model, cache, prompts: torch.Tensor, new: int, mask=None, one_by_one: bool = False
) -> list[list[int]]:
    """``new`` tokens of every row: the first from the prompt's pass, the second from a pass, the others from replays of
    one.

    Args:
        mask: which columns of the prompts are tokens, None: all. one_by_one: no graph is made.
    """
    told = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)  # as generate() does
    with torch.no_grad():
        first = model(input_ids=prompts, attention_mask=mask, **told).logits[:, -1:].argmax(-1)
    decoding, found = Decoding(model, cache, first), [first.clone()]
    before = list(cache.lengths) if isinstance(cache, KVpopCache) else []
    if one_by_one:
        decoding.step()
        replay = decoding.step
    else:
        replay = decoding.captured(bench)
    if bench.device == "cuda" and not one_by_one and before:
        assert cache.lengths == [seen + 1 for seen in before], "a pass that was recorded was counted"
    for i in range(new - 1):
        if i:
            replay()
        found.append(decoding.tokens.clone())
    return torch.cat(found, 1).tolist()


def after(cache: KVpopCache, passes: int, bench: Bench) -> None:
    """The host counts passes that were replayed; without a GPU there was no graph, and it has."""
    if bench.device == "cuda":
        cache.replayed(passes)
