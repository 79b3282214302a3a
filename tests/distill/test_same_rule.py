"""The training mask, the slots that serving keeps and the oracle follow one rule on the same scores."""

from __future__ import annotations

import pytest
import torch
from kernels.factories import random_page_table
from kernels.naive import visible_keys

from kvpop_vllm.cache.chunks import Chunks
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.distill.cutoffs import running_cutoffs
from kvpop_vllm.kernels import ops
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers.linear import LinearWeights
from kvpop_vllm.testing import retained_sets

HEADS, SIZE, LENGTH = 2, 32, 400


def positions_held(pages, table, layout, rule, budgets, length):
    """Return each head's retained positions: sinks and ring by role, long-range ones by position words."""
    first, n = rule.sinks + rule.window, layout.block_slots
    blocks = table[0, 0, layout.state_blocks :].long()
    near = {t for t in range(length) if t < rule.sinks or t >= length - rule.window}
    slots = [torch.arange(first, max(first, min(length, budget))) for budget in budgets]
    return [near | set(pages.position[blocks[slot // n], h, slot % n].tolist()) for h, slot in enumerate(slots)]


def check_the_same_rule(q, k, v, log_gamma, roles, chunks, topk=None):
    """Check that mask, oracle and pages retain the same tokens.

    A linear scorer reads channel 0 of the keys as the score, so that all three use bit-identical scores.

    Args:
        q: ``[S, Hq, D]`` float32.
        k, v: ``[S, H, D]`` float32.
        topk: ``[H]``, k of each head; None for that of the roles.
    """
    length, heads, size = k.shape
    weight = torch.zeros(heads, 2 * size)
    weight[:, 0] = 1.0
    scorer = LinearWeights(weight, torch.zeros(heads))
    rule = ops.RetentionRule(roles.sinks, roles.window, log_gamma, roles.step, scorer)
    score = k[..., 0].T.unsqueeze(0)
    slots = topk or [roles.topk] * heads
    mask = visible_keys(*running_cutoffs(score, log_gamma, roles, topk), roles.sinks, roles.window)[0]
    shape = roles.sinks, roles.window, slots, roles.step
    oracle = torch.from_numpy(retained_sets(score[0].numpy(), log_gamma.tolist(), *shape))
    assert torch.equal(mask, oracle)

    layout = PageLayout(heads, size, torch.float32, 16)
    budgets, start, i = torch.tensor([roles.first_long + k for k in slots], dtype=torch.int32), 0, 0
    pages, table = random_page_table(layout, 1, int(budgets.max()), torch.Generator().manual_seed(0))
    while start < length:
        count = min(chunks[i % len(chunks)], length - start)
        cut = slice(start, start + count)
        if count == 1:
            position = torch.tensor([start])
            ops.decode_step(q[cut], k[cut], v[cut], pages, table, position, budgets[None], rule=rule, scale=0.2)
        else:
            chunk = Chunks.of_request(start, count, budgets, rule.window)
            ops.prefill_chunk(q[cut], k[cut], v[cut], pages, table, chunk, rule=rule, scale=0.2)
        start, i = start + count, i + 1
        for h, retained in enumerate(positions_held(pages, table, layout, rule, budgets.tolist(), start)):
            assert retained == set(mask[h, start - 1].nonzero().flatten().tolist())


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("chunks", [[400], [64], [1], [7, 100, 1]], ids=str)
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("topk", [None, [9, 71]], ids=str)
def test_the_same_scores_keep_the_same_tokens(step, chunks, coarse, topk):
    g = torch.Generator().manual_seed(step)
    k, v = (torch.randn(LENGTH, HEADS, SIZE, generator=g) for _ in range(2))
    if coarse:
        k[..., 0] = (k[..., 0] * 2).round() / 4  # many ties; decays are dyadic
    q = torch.randn(LENGTH, 2 * HEADS, SIZE, generator=g)
    log_gamma = torch.tensor([-1 / 64, -1 / 2048], dtype=torch.float64)
    check_the_same_rule(q, k, v, log_gamma, Retention(59, 3, 16, step=step), chunks, topk)
