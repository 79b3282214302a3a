"""SnapKV against its paper's own selection, and what becomes of it in decoding."""

from __future__ import annotations

import pytest
import torch
from kernels.factories import random_page_table
from kvpop_vllm.policies.snapkv import SnapKV
from policies.test_identities import GROUP, HEADS, LENGTH, SCALE, SIZE, dense, tokens

from kvpop_vllm.cache.retained import retained_positions
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.policies.base import ModelShape

PROMPT, OBSERVED = 100, 32


@pytest.fixture(params=["reference", "cpp"])
def impl(request):
    return request.param


def policy(budget, **settings):
    return SnapKV(PolicySettings("snapkv", budget, **settings), ModelShape("llama", 1, HEADS, SIZE, LENGTH))


def serve(impl, count, budget, prompt=PROMPT):
    """Outputs ``[count, Hq, D]`` and the positions held after ``count`` tokens, per head."""
    own, (q, k, v) = policy(budget), tokens()
    layout = PageLayout(HEADS, SIZE, torch.float32, 16)
    pages, table = random_page_table(layout, 1, budget, torch.Generator().manual_seed(1))
    budgets = torch.full((HEADS,), budget, dtype=torch.int32)
    rule = own.layer_rule(0, slice(0, HEADS))
    chunk = (x[:count] for x in (q, k, v))
    out, _ = ops.prefill_chunk(*chunk, pages, table[0], 0, budgets, rule=rule, scale=SCALE, prompt=prompt, impl=impl)
    return out, retained_positions(pages, table[0, 0], count, own.retention.for_prompt(prompt))


def test_a_prompt_that_fits_until_its_end_is_cut_as_in_the_paper(impl):
    """Sum of the attention of the last 32 queries, mean over query heads, average pooling, top k of the prefix, and the
    observation window. 36 of 68 are kept."""
    out, held = serve(impl, PROMPT + 1, budget=PROMPT)
    q, k, v = tokens()
    torch.testing.assert_close(out[:PROMPT].double(), dense(q, k, v)[:PROMPT], rtol=0, atol=1e-5)
    keys = k[:PROMPT].double().repeat_interleave(GROUP, 1).transpose(0, 1)
    logits = q[PROMPT - OBSERVED : PROMPT].double().transpose(0, 1) @ keys.transpose(1, 2) * SCALE  # [Hq, 32, P]
    rows = torch.arange(PROMPT - OBSERVED, PROMPT).unsqueeze(1)
    weights = logits.masked_fill(torch.arange(PROMPT) > rows, -torch.inf).softmax(-1)
    votes = weights.unflatten(0, (HEADS, GROUP)).mean(1).sum(1)[:, : PROMPT - OBSERVED]
    pooled = torch.nn.functional.avg_pool1d(votes, 5, stride=1, padding=2)
    chosen = pooled.topk(PROMPT - 2 * OBSERVED, dim=-1).indices
    assert held == [sorted([*head, *range(PROMPT - OBSERVED, PROMPT + 1)]) for head in chosen.tolist()]


def test_generated_tokens_push_the_prompt_out_and_then_each_other(impl):
    """Budget 80: window 33, 31 undecided, 16 beyond; at the first generated token, and 32 tokens later."""
    _, before = serve(impl, 33, budget=80, prompt=32)
    _, after = serve(impl, 97, budget=80, prompt=32)
    assert before == [list(range(33))] * HEADS
    assert after == [[*range(48, 97)]] * HEADS  # decided at 96: tokens to 63 have left the window, 16 of them are kept


def test_the_prompt_decides(impl):
    """The same tokens under another prompt length: decisions fall elsewhere."""
    assert serve(impl, LENGTH, 80, prompt=90)[1] != serve(impl, LENGTH, 80, prompt=91)[1]


def test_prompt_lengths_are_asked_for(impl):
    with pytest.raises(ValueError, match=r"prompts must be \(1,\) for AttentionVotes, got None"):
        serve(impl, 10, 80, prompt=None)


def test_defaults_and_too_small_budgets():
    kept = policy(256).retention
    assert (kept.sinks, kept.window, kept.decide_every, kept.topk) == (0, 33, 32, 192) and kept.prompt_grid
    with pytest.raises(
        ConfigError, match="a budget of 64 is too small for 0 sinks \\+ window 33 \\+ 31 undecided \\+ 1"
    ):
        policy(64)
    smaller = policy(64, decide_every=8).retention
    assert (smaller.window, smaller.topk) == (9, 64 - 9 - 7)
