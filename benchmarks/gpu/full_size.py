"""`decode_step` at production's shapes next to attention and evictions by torch, for all requests and heads at once.

A small problem's kernels are those of a large one with other numbers of programs: here attention is split among
programs for one request, and not for 64.
"""

from collections.abc import Iterator

import torch
from full_pages import empty_pages, fill
from kernels.factories import random_rule, random_scorer

from gpu.clock import graph_of
from gpu.sections import HEADS, KV_HEADS, SIZE, Bench, within
from kvpop_vllm.cache.pages import PageLayout, Pages
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule

SINKS, WINDOW, SEEN, BUDGET, SLOTS = 4, 256, 16384, 4096, 64
STEPS = 50
CLOSE = 1e-4
"""Difference of scores below which implementations may evict another token."""


class Caches:
    """Full caches of R requests that have seen equally many tokens, in slots ``[R, H, B]``.

    Attributes:
        k, v: ``[R, H, B, D]``.
        score: ``[R, H, B]`` float32.
        position: ``[R, H, B]`` int64.
        margin: ``[R, H]`` float64, smallest difference between the token evicted and the next, of all steps.
    """

    def __init__(self, pages: Pages, table: torch.Tensor, rule: RetentionRule, budget: int):
        layout, heads = pages.layout, torch.arange(table.shape[1], device=table.device)
        slot = torch.arange(budget, device=table.device)
        rows = table[:, :, layout.state_blocks :].long()[:, :, slot // layout.block_slots]
        place = rows, heads.view(1, -1, 1), slot % layout.block_slots
        self.k, self.v, self.score = (x[place].clone() for x in (pages.k, pages.v, pages.score))
        self.position, self.rule = pages.position[place].long(), rule
        self.margin = torch.full(self.k.shape[:2], torch.inf, dtype=torch.float64, device=table.device)
        if rule.scorer.recurrent:
            states = table[:, :, : layout.state_blocks].long().flatten(0, 1)
            state = pages.load_states(states, heads.repeat(len(table)), rule.scorer)
            self.c, self.z, self.m = (x[0].unflatten(0, table.shape[:2]).clone() for x in state)

    def step(self, k: torch.Tensor, v: torch.Tensor, q: int) -> None:
        """Insert token q, ``k, v [R, H, D]``: the token that leaves the window replaces a long-range one or is dropped."""
        rule, ring = self.rule, self.rule.ring_slot(q)
        score = self._score(k, v, ring)
        long_range = slice(rule.first_long, None)
        raw = torch.cat([self.score[..., long_range], score], -1).double()
        position = torch.cat(
            [self.position[..., long_range], torch.full_like(self.position[..., :1], q - rule.window)], -1
        )
        ages = (q - position) // rule.decay_step
        effective = raw + ages * rule.log_gamma.view(1, -1, 1)
        lowest = effective.topk(2, dim=-1, largest=False)
        self.margin = self.margin.minimum(lowest.values.diff(dim=-1).squeeze(-1))
        victim = rule.first_long + lowest.indices[..., :1]
        stays = victim < self.k.shape[2]  # the newcomer is the last candidate
        victim = torch.where(stays, victim, ring)
        for array, value in (
            (self.k, self.k[:, :, ring].clone()),
            (self.v, self.v[:, :, ring].clone()),
            (self.score, score.squeeze(-1)),
            (self.position, position[..., -1]),
        ):
            index = victim.unsqueeze(-1).expand(-1, -1, -1, array.shape[-1]) if array.dim() == 4 else victim
            array.scatter_(2, index, value.unsqueeze(2))
        self.k[:, :, ring], self.v[:, :, ring] = k, v

    def _score(self, k, v, ring: int) -> torch.Tensor:
        """Take token ``k, v`` into the state and return the score ``[R, H, 1]`` of the token in a ring slot."""
        w, leaving = self.rule.scorer, torch.cat([self.k[:, :, ring], self.v[:, :, ring]], -1).float().unsqueeze(2)
        if not w.recurrent:
            return w.scores(self.k[:, :, ring : ring + 1], self.v[:, :, ring : ring + 1])
        key, value, igate, fgate = (x[:, :, 0] for x in w.inputs(torch.cat([k, v], -1).float().unsqueeze(2)))
        faded = torch.nn.functional.logsigmoid(fgate) + self.m
        self.m = torch.maximum(faded, igate)
        keep, gain = torch.exp(faded - self.m).unsqueeze(-1), torch.exp(igate - self.m).unsqueeze(-1)
        self.c = self.c * keep.unsqueeze(-1) + (gain * key).unsqueeze(-1) * value.unsqueeze(-2)
        self.z = self.z * keep + gain * key
        query = w.query(leaving)[:, :, 0]
        smallest = 1e-6 * torch.exp(-self.m.clamp(-60, 60))
        h = torch.einsum("rhf,rhfv->rhv", query, self.c) / ((query * self.z).sum(-1) + smallest).unsqueeze(-1)
        return w.score(h.unsqueeze(2), leaving)

    def attend(self, q: torch.Tensor, scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs ``[R, Hq, D]`` and log-sum-exps ``[R, Hq]``, with products in a dtype, request by request."""
        outs, lses = [], []
        for r in range(len(q)):
            rows = q[r].unflatten(0, (self.k.shape[1], -1)).to(dtype)
            logits = (rows @ self.k[r].to(dtype).transpose(1, 2)).to(torch.promote_types(dtype, torch.float32)) * scale
            lses.append(logits.logsumexp(-1).flatten())
            outs.append((logits.softmax(-1).to(dtype) @ self.v[r].to(dtype)).flatten(0, 1))
        return torch.stack(outs), torch.stack(lses)


def steps_right(bench: Bench, kind: str, requests: int) -> Iterator[dict]:
    """Check steps of full caches: retained tokens, outputs, and that a CUDA graph gives the same to the bit.

    Args:
        bench: device and dtype.
        kind: "key norm" or "mlstm".
        requests: R.
    """
    heads, size, group, budget, slots, count = KV_HEADS, SIZE, HEADS // KV_HEADS, BUDGET, SLOTS, STEPS
    sinks, window, tokens_seen = SINKS, WINDOW, SEEN
    if bench.small:
        heads, size, group, budget, slots, count, sinks, window, tokens_seen = 1, 32, 2, 300, 16, 4, 2, 9, 700
    draw = torch.Generator().manual_seed(requests)
    scorer = random_scorer("mlstm", heads, size, draw, skip=True) if kind == "mlstm" else ops.KeyNorm()
    rule = random_rule(scorer, heads, sinks, window, draw).to(bench.device)
    layout = PageLayout(heads, size, bench.dtype, slots, state_floats=rule.state_floats(size))
    with torch.device(bench.device):
        pages, table = empty_pages(layout, requests, budget)
        fill(pages, table, rule, budget, tokens_seen)
        positions, budgets = (
            torch.full((requests,), tokens_seen),
            torch.full((requests, heads), budget, dtype=torch.int32),
        )
        tokens = [
            [torch.randn(requests, n, size, dtype=bench.dtype) for n in (heads * group, heads, heads)]
            for _ in range(count)
        ]
    expected, replayed = Caches(pages, table, rule, budget), layout.view(pages.raw.clone())

    def step(pages, inputs):
        options = dict(rule=rule, scale=size**-0.5, impl="triton")
        return ops.decode_step(*inputs, pages, table, positions, budgets, **options)

    sides = []
    for i, (q, k, v) in enumerate(tokens):
        actual = step(pages, (q, k, v))
        positions += 1
        expected.step(k, v, tokens_seen + i)
        wide, eager = (expected.attend(q, size**-0.5, dtype) for dtype in (torch.float64, bench.dtype))
        caches = Caches(pages, table, rule, budget)
        retained = [cache.position[..., rule.first_long :].sort(-1).values for cache in (caches, expected)]
        equal = retained[0].eq(retained[1]).all(-1)
        assert (equal | (expected.margin < CLOSE)).all(), (
            f"other tokens after step {i}, margins {expected.margin[~equal].tolist()[:5]}"
        )
        compared = equal.repeat_interleave(group, 1)  # other heads count as equal
        sides.append(
            [
                (torch.where(compared[..., None], out, 0), torch.where(compared, lse, 0))
                for out, lse in (actual, wide, eager)
            ]
        )
    yield bench.row("steps", count, "count")
    yield bench.row("heads that evicted another token by a close decision", int((~equal).sum()), "count")
    for i, name in enumerate(("out", "lse")):
        three = (torch.cat([side[j][i] for side in sides]) for j in range(3))
        yield from within(bench, *three, name, factor=3.0)
    if bench.device == "cuda":
        yield from _replay(bench, step, replayed, pages, tokens, positions)


def _replay(bench: Bench, step, replayed: Pages, pages: Pages, tokens, positions) -> Iterator[dict]:
    """Check that replays of a recorded step leave the same bytes as the steps did."""
    raw, inputs = replayed.raw.clone(), [x.clone() for x in tokens[0]]
    replay = graph_of(lambda: (step(replayed, inputs), positions.add_(1)))
    replayed.raw.copy_(raw)
    positions.fill_(SEEN)
    for new_inputs in tokens:
        for buffer, new in zip(inputs, new_inputs, strict=True):
            buffer.copy_(new)
        replay()
    assert torch.equal(replayed.raw, pages.raw), "a recorded step leaves other bytes than a step"
    yield bench.row("bytes that differ behind a recorded step", 0, "count")
