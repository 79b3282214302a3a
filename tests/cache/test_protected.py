"""Tokens and blocks of requests with protected prompts, compared with plain counts."""

import dataclasses
import itertools
import math

import pytest
import torch
from kernels.factories import random_page_table, random_rule, random_scorer
from policies.matrix import SHARES

from kvpop_vllm import policies
from kvpop_vllm.cache.accounting import request_bytes
from kvpop_vllm.cache.pages import PageLayout, Prefix
from kvpop_vllm.cache.ranks import Division, FixedBudgets, layers_of_stages, shards_of
from kvpop_vllm.config import PolicySettings, protected_tokens
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import PromptMatching, PromptVotes
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.roles import Retention
from kvpop_vllm.rules.retained import held_tokens
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

pytestmark = pytest.mark.usefixtures("few_threads")

HEADS, SIZE = 2, 32


def pages_and_keys(kind, protect, count, budget=14, sinks=2, window=4, threshold=False):
    """Serve one request token by token and return its pages, tables, rule, budgets and keys.

    The keys identify the tokens in the pages.
    """
    draw = torch.Generator().manual_seed(count)
    scorer = random_scorer(kind, HEADS, SIZE, draw, **({"threshold": -0.3} if threshold else {}))
    rule = random_rule(scorer, HEADS, sinks, window, draw)
    layout = PageLayout(HEADS, SIZE, torch.float32, 16, rule.state_floats(SIZE))
    pages, table = random_page_table(layout, 2, budget + 48, draw)
    prefix_row, tail = table[0, 0, :3].unsqueeze(0), table[1].unsqueeze(0)
    prefix = Prefix(pages, prefix_row, torch.tensor([protect]))
    keys = torch.randn(count, HEADS, SIZE, generator=draw)
    budgets = torch.full((1, HEADS), budget, dtype=torch.int32)
    for t in range(count):
        token = keys[t : t + 1]
        if t < protect:
            pages.write(token, token, prefix_row[0, t // 16].view(1).long(), torch.tensor([t % 16]))
        if t == protect:
            ops.begin_tail(pages, tail, prefix, rule=rule)
        gate_scores = token[..., 0].contiguous() if kind == "gate_scores" else None
        options = dict(rule=rule, scale=1.0, gate_scores=gate_scores, prefix=prefix if protect else None)
        ops.decode_step(torch.zeros(1, HEADS, SIZE), token, token, pages, tail, torch.tensor([t]), budgets, **options)
    return pages, prefix_row[0], tail[0], rule, budgets[0], keys


@pytest.mark.parametrize("kind, threshold", [(None, False), ("linear", False), ("mlstm", False), ("gate_scores", True)])
@pytest.mark.parametrize("protect", [0, 1, 15, 16, 17, 33])
@pytest.mark.parametrize("beyond", [0, 1, 4, 12, 13, 40])
def test_held_tokens_are_those_in_the_pages(kind, threshold, protect, beyond):
    tokens = max(1, protect + beyond)
    pages, prefix_row, tail, rule, budgets, keys = pages_and_keys(kind, protect, tokens, threshold=threshold)
    retained = held_tokens(pages, tail, tokens, rule, budgets, protect)
    state, slots = pages.layout.state_blocks, torch.arange(min(tokens - protect, 12 if protect else 14))
    for h in range(HEADS):
        stored = [pages.k[int(prefix_row[t // 16]), h, t % 16] for t in range(min(tokens, protect))]
        end = len(slots)
        if threshold and tokens - protect > (4 if protect else 6):
            end = (4 if protect else 6) + int(pages.position[int(tail[h, state]), h, 1])
        stored += [pages.k[int(tail[h, state + s // 16]), h, s % 16] for s in slots[:end].tolist()]
        positions = {int((keys[:, h] == key).all(-1).nonzero()) for key in stored}
        assert set(retained[h].nonzero().flatten().tolist()) == positions and len(positions) == len(stored)


def counted(length: int, protect: int, budget: int, sinks: int, slots: int, state: int) -> int:
    """Return the number of blocks by adding token after token, a block whenever none has room."""
    prefix = tail = 0
    for t in range(length):
        if t < protect:
            prefix += t % slots == 0
        else:
            place = t - protect
            tail += place % slots == 0 and place < budget - (sinks if protect else 0)
    return prefix + tail + (state if length > protect else 0)


SHAPES = list(itertools.product([6, 16, 17, 40], [0, 1, 4], [16, 32], [0, 2]))


def make_spec(budget, sinks, slots, state, protect, shares=None, max_budget=None):
    from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec

    return FixedBudgetSpec(
        block_size=slots, num_kv_heads=2, head_size=32, kv_dtype=torch.float32, state_content_bytes=264, budget=budget,
        sinks=sinks, state_floats=state * slots * 66, shares=shares, protect=protect, max_budget=max_budget or budget, max_protect=protect,
    )  # fmt: skip


@pytest.mark.parametrize("protect", [0, 1, 5, 16, 33, True])
def test_blocks_and_most_blocks(protect):
    """``blocks`` is right for all that may be protected and ``most_blocks`` is the largest of them, at every length."""
    for budget, sinks, slots, state in SHAPES:
        spec = make_spec(budget, sinks, slots, state, protect)
        worst = 0
        for length in range(1, 90):
            for p in range(length + 1 if protect is True else protect + 1):  # a request may ask for less, or nothing
                assert spec.blocks(length, spec.slots(p)) == counted(length, p, budget, sinks, slots, state), (
                    length,
                    p,
                )
                worst = max(worst, spec.blocks(length, spec.slots(p)))
            assert spec.most_blocks(length) == worst, (budget, sinks, slots, state, length)


@pytest.mark.parametrize("largest", [1, 16, 33, True])
def test_most_blocks_of_what_requests_may_ask(largest):
    """``most_blocks`` is the exact worst case over every protection and every budget up to the largest."""
    for budget, sinks, slots, state in SHAPES[::5]:
        spec = make_spec(budget, sinks, slots, state, largest, max_budget=2 * budget)
        for length in range(1, 70):
            longest = min(length, protected_tokens(largest, length))
            requests = itertools.product(range(longest + 1), range(sinks + 2, 2 * budget + 1))
            assert spec.most_blocks(length) == max(
                spec.blocks(length, spec.slots(p, request_budget)) for p, request_budget in requests
            )
            for p, request_budget in ((0, 2 * budget), (min(5, length), sinks + 2)):
                assert spec.blocks(length, spec.slots(p, request_budget)) == counted(
                    length, p, request_budget, sinks, slots, state
                )


@pytest.mark.parametrize("protect", [1, 16, 33, True])
def test_most_blocks_of_unequal_shares(protect):
    """Blocks of unequal shares suffice for the tails of all heads, and ``most_blocks`` covers every prompt.

    The heads' pages of all layers are counted together and rounded up to whole blocks.
    """
    shares = Division(FixedBudgets(((30, 30), (12, 12))), 4, 2, 2, shards_of([(0, 2)], 2, 1), one_budget=True)
    for sinks, state in itertools.product([0, 4], [0, 1]):
        spec = make_spec(21, sinks, 16, state, protect, shares)
        for length in range(1, 90):
            counts = []
            for prompt in range(1, length + 1):
                p = min(length, protected_tokens(protect, prompt))
                tail = length - p
                pages = sum(state + -(-min(tail, budget - (sinks if p else 0)) // 16) for budget in (30, 30, 12, 12))
                counts.append(spec.blocks(length, spec.slots(p)))
                assert counts[-1] >= -(-p // 16) + (-(-pages // 4) if tail else 0)
            assert spec.most_blocks(length) >= max(counts)


@pytest.mark.parametrize("ranks, stages", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("trained", [(), ((16, 20), (8, 12))], ids=["one window", "trained windows"])
def test_most_blocks_of_unequal_shares_that_requests_scale(tmp_path, ranks, stages, trained):
    """``most_blocks`` covers every budget that a request may ask for, and the windows that a scorer has there.

    Blocks are counted with the budgets of each rank's heads, and suffice for each.
    """
    model = write_tiny_model(tmp_path / "model")
    write_random_scorer(tmp_path / "scorer", model, "mlp", sinks=4, window=16, topk=20, trained=trained)
    settings = {"policy": "kvpop-mlp", "scorer": str(tmp_path / "scorer"), "max_budget": 90}
    policy = policies.get("kvpop-mlp")(
        PolicySettings.parse(settings | {"calibration": str(SHARES)}), ModelShape.of(model, 256)
    )
    shards = shards_of(layers_of_stages(2, stages), 2, ranks)
    division = policy.division(shards)
    largest = [(retention.budget, retention.window) for retention in policy.largest_retentions()]
    assert len(largest) == (3 if trained else 1) and not policy.one_budget
    spec = dataclasses.replace(make_spec(40, 4, 16, 0, 0, division, 90), largest=tuple(largest))
    for length in (40, 70, 200):
        counts = []
        for budget in range(30, 91):
            retention = policy.retention_of(budget)
            table = policy.budgets_of(retention)
            assert int(table.sum()) == budget * 4 and int(table.min()) >= retention.first_long
            by_rank = [table[slice(*shard.layers), slice(*shard.heads)] for shard in shards]
            pages = [((budgets.clamp_max(length) + 15) // 16).double() for budgets in by_rank]
            needed = [math.ceil(each_rank.mean().item()) for each_rank in pages]
            counts.append(spec.blocks(length, spec.slots(0, budget, retention.window)))
            assert counts[-1] == max(needed), (budget, length)
        assert max(counts) <= spec.most_blocks(length) <= max(counts) + 1


def test_bytes_of_a_protected_request():
    """A protected request with 3 heads, D = 64, bfloat16 and 30 layers has the bytes counted by hand.

    Its 700 protected tokens take 11 blocks. Then come a state block and 1,024 slots for the other 4,300
    tokens; sinks would need one more block.
    """
    layout, retention = PageLayout(3, 64, torch.bfloat16, 64, state_floats=64 * 64 + 64 + 1), Retention(1028, 4, 64)
    request = request_bytes(layout, 30, 5000, retention, protected=700)
    assert (request.canonical, request.blocks) == ((700 + 1024) * 256 * 90, 11 + 1 + 16)
    assert request.allocated == 28 * 64 * 264 * 90
    protected = request_bytes(layout, 30, 700, retention, protected=900)
    assert (protected.canonical, protected.blocks) == (700 * 256 * 90, 11)
    first = request_bytes(layout, 30, 701, retention, protected=700)
    assert (first.canonical, first.blocks) == (701 * 256 * 90, 13)
    assert request_bytes(layout, 30, 5000, retention) == request_bytes(layout, 30, 5000, retention, protected=0)


def test_pages_of_another_length_are_an_error():
    pages, _, tail, rule, budgets, _ = pages_and_keys(None, 5, 20)
    with pytest.raises(ValueError, match=r"have seen \[20, 20\] tokens, not 19"):
        held_tokens(pages, tail, 19, rule, budgets, 5)
    assert held_tokens(pages, tail, 3, rule, budgets, 5).all()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("budget", [40, 64])
def test_blocks_of_prompts_that_vote(budget, adaptive):
    """A prompt is held densely; its state comes with the first query that votes, its tail at its end.

    Heads that divide their slots fill a block more where the budget fills whole ones, but not for a prompt that fits.
    """
    spec = make_spec(budget, 2, 16, 1, True)
    spec = dataclasses.replace(spec, compression=PromptVotes(2, safe=0.2 if adaptive else None))
    extra = {40: 0, 64: 1}[budget] if adaptive else 0  # two heads of 80 slots fill at most 6 blocks, of 128 at most 9
    for prompt in (20, 40, 64, 65, 100):
        for length in range(1, 130):
            prompt_blocks, slots = -(-prompt // 16), min(length, budget)
            if length <= prompt - 32:
                expected = -(-length // 16)
            elif length < prompt:
                expected = prompt_blocks + 1
            else:
                expected = (
                    prompt_blocks + 1 + (-(-budget // 16) + extra if prompt > budget and adaptive else -(-slots // 16))
                )
            assert spec.blocks(length, spec.slots(prompt)) == expected, (prompt, length)


def test_requests_of_less_budget_fit_where_slots_are_made():
    """A smaller window may divide a short prompt's slots less well; the example of 130 tokens needs the block beyond."""
    spec = dataclasses.replace(make_spec(136, 0, 16, 3, True), compression=PromptMatching(2, 8))
    spec = dataclasses.replace(spec, window=34, max_window=34)
    assert spec.blocks(130, spec.slots(130, 135, 33)) == 1 + max(
        spec.blocks(130, spec.slots(p, 136, 34)) for p in range(131)
    )
    for length, budget in itertools.product((1, 30, 64, 65, 97, 130, 150), range(4, 137)):
        needed = max(spec.blocks(length, spec.slots(prompt, budget, budget // 4)) for prompt in range(length + 1))
        assert needed <= spec.most_blocks(length), (length, budget)


@pytest.mark.parametrize("budget, window", [(40, 10), (64, 16), (57, 20)])
def test_blocks_of_prompts_that_slots_are_made_of(budget, window):
    """A prompt is held densely, its state and the blocks of made slots come with the first stored query.

    The tail comes at the prompt's end, and what is dropped then stays in the count. ``most_blocks`` is the worst case.
    """
    spec = dataclasses.replace(make_spec(budget, 0, 16, 3, True), compression=PromptMatching(2, 8))
    spec = dataclasses.replace(spec, window=window, max_window=window)
    worst = dict.fromkeys(range(1, 130), 0)
    for prompt, length in itertools.product(range(130), range(1, 130)):
        if prompt > length + 8:
            assert spec.blocks(length, spec.slots(prompt)) == -(-length // 16)
            continue
        made_slots = max(0, min(prompt - window, budget - window))
        slots = {t - min(t, max(0, prompt - budget)) for t in range(length)}  # made slots first, then the ring
        ring = (
            {(slot - made_slots) % (budget - made_slots) for slot in slots if slot >= made_slots}
            if length >= prompt
            else ()
        )
        if prompt - 8 < length or not prompt:
            expected = -(-prompt // 16) + -(-made_slots // 16) + 3 + -(-len(ring) // 16)
            assert spec.blocks(length, spec.slots(prompt)) == expected, (prompt, length)
        worst[length] = (
            max(worst[length], spec.blocks(length, spec.slots(prompt))) if prompt <= length else worst[length]
        )
    assert all(spec.most_blocks(length) - blocks in (0, 1) for length, blocks in worst.items())
    ((first, last), state) = spec.dropped(spec.slots(100, budget, window))
    assert (first, last) == (0, 7) and state[0] == 7 + -(-(budget - window) // 16) and state[1] == state[0] + 3
