"""Protected prefixes in serving kernels: each implementation against an independent float64 loop."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import pytest
import torch
from kernels.exact import Exact
from kernels.factories import given_scores, poisoned_pages, random_rule, random_scorer
from kernels.problems import CLOSE, CLOSE_MASS, SOME_CASES
from threads import one_thread

from kvpop_vllm import _C
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import PageLayout, Prefix, cdiv
from kvpop_vllm.kernels.retained import held_tokens
from kvpop_vllm.testing import assert_within_budget, eager_runs, masked_lse

CASES = SOME_CASES | {
    "gate_scores-threshold-corrected": ("gate_scores", {"threshold": -0.5, "correction": True}),
    "mlstm-short": ("mlstm", {"replay": 5}),
    "mlstm-no-replay": ("mlstm", {"replay": 0}),
    "mlstm-immediate-short": ("mlstm", {"delayed": False, "replay": 3}),
}
SINKS, WINDOW, TOPK, SLOTS = 2, 5, 13, 16
BUDGET = SINKS + WINDOW + TOPK
PROTECTED = [1, SLOTS - 1, SLOTS, SLOTS + 1, BUDGET - 1, BUDGET, BUDGET + 1, 2 * SLOTS]
BEYOND = 34
"""Number of tokens behind the prefix, larger than the tail's number of slots."""
IMPLS = ["reference", *_C.isa_levels()]


@pytest.fixture(autouse=True)
def one_thread_and_fastest_isa_afterwards():
    with one_thread():
        yield
    _C.set_isa(_C.isa_levels()[-1])


def use(impl: str) -> str:
    """Select an implementation of IMPLS and return its name as ops take it."""
    if impl == "reference":
        return impl
    _C.set_isa(impl)
    return "cpp"


@dataclass
class Problem:
    """A rule and the tokens of one request, the first p of them protected."""

    case: str
    protect: int
    dtype: torch.dtype = torch.float32
    length: int | None = None
    heads: int = 2
    group: int = 2
    size: int = 32
    slots: int = SLOTS
    sinks: int = SINKS
    window: int = WINDOW
    topk: int = TOPK
    seed: int = 0

    def __post_init__(self):
        kind, options = CASES[self.case]
        options = dict(options)
        correction, replay = options.pop("correction", False), options.pop("replay", ops.RetentionRule.replay)
        draw = torch.Generator().manual_seed(self.seed)
        scorer = random_scorer(kind, self.heads, self.size, draw, **options)
        rule = random_rule(scorer, self.heads, self.sinks, self.window, draw, 1, correction)
        self.rule = replace(rule, replay=replay)
        self.layout = PageLayout(self.heads, self.size, self.dtype, self.slots, self.rule.state_floats(self.size))
        self.budget, self.scale = self.rule.first_long + self.topk, self.size**-0.5
        self.length = self.length or self.protect + BEYOND
        draw = torch.Generator().manual_seed(self.seed + 1000 * self.protect)
        self.q, self.k, self.v = (
            torch.randn(self.length, n, self.size, generator=draw).to(self.dtype)
            for n in (self.heads * self.group, self.heads, self.heads)
        )
        self.gate_scores = given_scores(self.rule, self.k)

    @property
    def roles(self) -> tuple[int, int]:
        """Number of tokens that are never evicted, and the budget that includes them."""
        return (self.protect, self.protect + self.budget - self.sinks) if self.protect else (self.sinks, self.budget)

    def exact(self) -> dict[str, torch.Tensor]:
        """Return the exact results of all heads, in float64.

        Returns:
            ``out [L, Hq, D]``, ``lse [L, Hq]``, ``magnitude [L, Hq, D]`` of the values, the retained tokens
            ``held [L, H, L]``, and ``margin``, the smallest of all decisions.
        """
        sinks, budget = self.roles
        outs, lses, sizes = [], [], []
        held, margin = torch.zeros(self.length, self.heads, self.length, dtype=torch.bool), torch.inf
        for h in range(self.heads):
            begins = max(0, self.protect - self.rule.replay)
            one = Exact(replace(self.rule, sinks=sinks), h, budget, begins=begins)
            rows = slice(h * self.group, (h + 1) * self.group)
            for t in range(self.length):
                own = None if self.gate_scores is None else self.gate_scores[t, h]
                out, lse, size, least = one.step(t, self.q[t, rows], self.k[t, h], self.v[t, h], self.scale, own)
                outs.append(out), lses.append(lse), sizes.append(size)
                held[t, h, list(one.tokens)] = True
                margin = min(margin, least)
        shape = self.heads, self.length, self.group
        outs, sizes = (torch.stack(x).view(*shape, -1).transpose(0, 1).flatten(1, 2) for x in (outs, sizes))
        lses = torch.stack(lses).view(shape).transpose(0, 1).flatten(1)
        return {"out": outs, "lse": lses, "magnitude": sizes, "held": held, "margin": margin}

    def lse(self, held: torch.Tensor) -> torch.Tensor:
        """Return log-sum-exps ``[L, Hq]`` in float32 over the tokens ``held [L, H, L]``."""
        q, k = (x.transpose(0, 1).float() for x in (self.q, self.k))
        return masked_lse(q, k, held.transpose(0, 1))


@functools.cache
def problem(case: str, protect: int, dtype: torch.dtype = torch.float32):
    """Return a problem without close decisions, and its exact results with eager log-sum-exps."""
    for seed in range(20):
        found = Problem(case, protect, dtype, seed=seed)
        exact = found.exact()
        if exact["margin"] > (CLOSE_MASS if found.rule.coupled else CLOSE):
            exact["eager"] = eager_runs(functools.partial(found.lse, exact["held"]))
            return found, exact
    raise AssertionError("no seed does")


@dataclass
class Pool:
    """Pages of several requests under one rule.

    Prefix, state and tail of each request lie in random blocks; no request has block 0.
    """

    problems: list[Problem]
    byte: int = 255
    seen: list[int] = field(default_factory=list)

    def __post_init__(self):
        first = self.problems[0]
        self.layout, self.rule = first.layout, first.rule
        width = self.layout.blocks(first.budget, first.budget)
        prefixes = [cdiv(p.protect, self.layout.block_slots) for p in self.problems]
        total = sum(prefixes) + width * len(prefixes)
        blocks = (1 + torch.randperm(total + 2, generator=torch.Generator().manual_seed(7))).int()
        self.pages = poisoned_pages(self.layout, total + 3)
        self.pages.raw.fill_(self.byte)
        self.prefix_table = torch.zeros(len(prefixes), max(1, *prefixes, 1), dtype=torch.int32)
        rows, at = [], 0
        for r, count in enumerate(prefixes):
            self.prefix_table[r, :count] = blocks[at : at + count]
            rows.append(blocks[at + count : at + count + width])
            at += count + width
        self.spare = blocks[at:]
        self.table = torch.stack(rows).unsqueeze(1).expand(-1, self.layout.num_kv_heads, -1)
        self.tokens = torch.tensor([p.protect for p in self.problems])
        self.budgets = torch.full(self.table.shape[:2], first.budget, dtype=torch.int32)
        self.seen = [0] * len(prefixes)

    def prefix(self, requests: list[int]) -> Prefix | None:
        """Return the prefixes, or None if all are empty, which tests calls without the argument."""
        if not self.tokens[requests].any():
            return None
        return Prefix(self.pages, self.prefix_table[requests], self.tokens[requests])

    def begin(self, r: int, count: int, impl: str) -> slice:
        """Write protected tokens and build the scorer's state, as before a step; return the step's tokens."""
        own, start, end = self.problems[r], self.seen[r], self.seen[r] + count
        t = torch.arange(start, max(start, min(end, own.protect)))
        prefix = Prefix(self.pages, self.prefix_table[[r]], self.tokens[[r]])
        prefix.write(own.k[t], own.v[t], self.prefix_table[r, t // own.slots].long(), t % own.slots)
        if start <= own.protect < end:
            ops.begin_tail(self.pages, self.table[[r]], prefix, rule=self.rule, impl=impl)
        self.seen[r] = end
        return slice(start, end)

    def chunk(self, r: int, count: int, impl: str):
        own, cut = self.problems[r], self.begin(r, count, impl)
        gate_scores = None if own.gate_scores is None else own.gate_scores[cut]
        return ops.prefill_chunk(
            own.q[cut], own.k[cut], own.v[cut], self.pages, self.table[r], cut.start, self.budgets[r],
            rule=self.rule, scale=own.scale, gate_scores=gate_scores, prefix=self.prefix([r]), impl=impl,
        )  # fmt: skip

    def decode(self, requests: list[int], impl: str):
        """Advance these requests by one token each, in one step."""
        at = [self.begin(r, 1, impl).start for r in requests]
        q, k, v = (
            torch.stack([getattr(self.problems[r], x)[t] for r, t in zip(requests, at, strict=True)]) for x in "qkv"
        )
        gate_scores = given_scores(self.rule, k)
        return ops.decode_step(
            q, k, v, self.pages, self.table[requests], torch.tensor(at), self.budgets[requests],
            rule=self.rule, scale=self.problems[0].scale, gate_scores=gate_scores, prefix=self.prefix(requests), impl=impl,
        )  # fmt: skip

    def held(self, r: int) -> torch.Tensor:
        """Return the mask of retained tokens, ``[H, seen]``."""
        own = self.problems[r]
        return held_tokens(self.pages, self.table[r], self.seen[r], self.rule, self.budgets[r], own.protect)

    def serve(self, chunks: list[int], impl: str, r: int = 0):
        """Serve a whole request in ``chunks``, where 0 is a decode step and the last entry is repeated.

        Returns:
            Outputs, log-sum-exps, retained tokens by number of tokens seen, and a mask of the tokens that
            came in chunks of the C++ kernel.
        """
        outs, lses, held, i, exponential = [], [], {}, 0, []
        name = use(impl)
        while self.seen[r] < self.problems[r].length:
            count = min(chunks[min(i, len(chunks) - 1)], self.problems[r].length - self.seen[r])
            out, lse = self.chunk(r, count, name) if count else self.decode([r], name)
            outs.append(out), lses.append(lse)
            held[self.seen[r]] = self.held(r)
            i += 1
            exponential += [bool(count) and name == "cpp"] * len(out)
        return torch.cat(outs), torch.cat(lses), held, torch.tensor(exponential)


def check(own: Problem, exact, found) -> None:
    """Check that retained tokens are exact and outputs and log-sum-exps within their error budgets.

    Outputs are within their roundings (see test_decode_step.check_roundings). In bfloat16 the log-sum-exps of
    tokens in chunks of the C++ kernel may be off by up to 2^-13.
    """
    out, lse, held, fast = found
    for seen, tokens in held.items():
        assert torch.equal(tokens, exact["held"][seen - 1, :, :seen]), f"after {seen} tokens"
    unit = 2.0**-8 if own.dtype == torch.bfloat16 else 2.0**-19
    error = (out.double() - exact["out"]).abs()
    assert (error <= unit * (exact["magnitude"] + exact["out"].abs()) + 1e-6).all(), float(error.max())
    if own.dtype == torch.bfloat16 and fast.any():
        assert (lse[fast].double() - exact["lse"][fast]).abs().max() <= 2.0**-13
        lse = torch.where(fast.unsqueeze(1), exact["lse"].float(), lse)
    assert_within_budget(lse, exact["lse"], exact["eager"], name="lse")


def cuts(protect: int) -> dict[str, list[int]]:
    """Return chunks of a request by name; 0 is a decode step, and the last entry is used for all the rest."""
    found = {"whole": [10_000], "decode": [0], "sevens": [7], "crosses": [protect + 3, 9, 0], "ends": [protect, 11, 0]}
    if protect > 1:
        found["last-of-one"] = [protect - 1, 0, 0, 6, 64]
        found["short-of-it"] = [protect - 1, 64]
    return found


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("protect", PROTECTED)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_rule_however_it_is_cut(case, protect, impl):
    own, exact = problem(case, protect)
    for name, chunks in cuts(protect).items():
        if (
            impl != "reference"
            or name == "whole"
            or (name, protect) in (("crosses", SLOTS + 1), ("ends", 1), ("ends", 2 * SLOTS))
        ):
            check(own, exact, Pool([own]).serve(chunks, impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("protect", [1, SLOTS, 2 * SLOTS])
@pytest.mark.parametrize(
    "case", ["none", "mass-mean", "gate_scores-threshold", "linear", "mlstm", "mlstm-corrected", "moment"]
)
def test_bfloat16(case, protect, impl):
    own, exact = problem(case, protect, torch.bfloat16)
    for name in ["crosses"] if impl == "reference" else cuts(protect):
        check(own, exact, Pool([own]).serve(cuts(protect)[name], impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "case", ["none", "mass-mean", "moment-corrected", "gate_scores-threshold", "mlstm", "mlstm-short"]
)
def test_several_requests_in_one_step(case, impl):
    """Requests without a prefix, at its end, below it and behind it are right in one step.

    Each gives the same as alone, to the bit.
    """
    known = [problem(case, protect) for protect in (0, 1, 17, 32, 21)]
    seed, protects = max(own.seed for own, _ in known), (0, 1, 17, 32, 21)
    own = [Problem(case, protect, seed=seed) for protect in protects]
    together, alone = Pool(own), Pool(own)
    name, requests = use(impl), list(range(len(own)))
    for pool in (together, alone):
        for r, start in enumerate((3, 1, 17, 20, 35)):
            pool.chunk(r, start, name)
    exact = [each.exact() for each in own]
    for _ in range(6 if impl == "reference" else 15):
        out, lse = together.decode(requests, name)
        for r in requests:
            one, least = alone.decode([r], name)
            assert torch.equal(out[r : r + 1], one) and torch.equal(lse[r : r + 1], least)
            t, unit = together.seen[r] - 1, 2.0**-19
            error = (out[r].double() - exact[r]["out"][t]).abs()
            if exact[r]["margin"] > CLOSE_MASS:
                assert torch.equal(together.held(r), exact[r]["held"][t, :, : t + 1])
                assert (error <= unit * (exact[r]["magnitude"][t] + exact[r]["out"][t].abs()) + 1e-6).all()
    assert torch.equal(together.pages.raw, alone.pages.raw)
    assert (together.pages.raw[together.spare.long()] == 255).all() and (together.pages.raw[0] == 255).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "case", ["none", "mass-newest", "gate_scores-threshold", "moment-corrected", "mlstm", "mlstm-immediate"]
)
def test_nothing_is_taken_from_the_bytes_that_lay_there(case, impl):
    """Results do not depend on bytes that lay in the pages before.

    These come from a new pool, one full of NaN, another request in the same blocks, and the request itself,
    stepped back to its prefix's end or below.
    """
    own = problem(case, 17)[0]
    other = Problem(case, 17, seed=own.seed, length=60)
    other.q, other.k, other.v = (x.flip(0) for x in (other.q, other.k, other.v))
    found = []
    for byte in (0, 255) if impl == "reference" else (0, 1, 127, 255):
        found.append(Pool([own], byte).serve([20, 0], impl))
    used = Pool([other])
    used.serve([11], impl)
    used.problems, used.seen = [own], [0]
    found.append(used.serve([20, 0], impl))
    for out, lse, held, _ in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])
        assert all(torch.equal(held[seen], tokens) for seen, tokens in found[0][2].items())
    for back in [17] if impl == "reference" else (17, 16, 3):
        again = Pool([own])
        again.serve([20, 0], impl)
        again.seen = [back]
        out, _, held, _ = again.serve([20 - back, 0], impl)
        torch.testing.assert_close(out, found[0][0][back:], rtol=0, atol=2e-5)
        assert all(torch.equal(held[seen], found[0][2][seen]) for seen in held)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_prefix_is_written_once_and_never_changes(impl):
    """The prefix's keys and values are exact, and nothing else is written except the tail's blocks."""
    for case in ("mlstm", "gate_scores-threshold", "mass-mean"):
        own = problem(case, 21)[0]
        pool = Pool([own])
        pool.serve([30, 0], impl)
        keys, values = Prefix(pool.pages, pool.prefix_table, pool.tokens).gather(0, 0, 21)
        assert torch.equal(keys, own.k[:21].transpose(0, 1)) and torch.equal(values, own.v[:21].transpose(0, 1))
        blocks = pool.prefix_table[0].long()
        assert pool.pages.k[blocks[1], :, 5:].isnan().all() and pool.pages.v[blocks[1], :, 5:].isnan().all()
        assert pool.pages.score[blocks].isnan().all() and (pool.pages.position[blocks] == -1).all()
        assert (pool.pages.raw[pool.spare.long()] == 255).all() and (pool.pages.raw[0] == 255).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", [name for name in CASES if not name.endswith(("short", "no-replay"))])
def test_a_prefix_is_so_many_sinks(case, impl):
    """An unprotected request with p sinks and a budget of p + B - s retains and returns the same."""
    for protect in [SLOTS] if impl == "reference" else (1, SLOTS, BUDGET + 1):
        own = problem(case, protect)[0]
        plain = Problem(case, 0, length=own.length, seed=own.seed, sinks=protect)
        plain.rule, plain.q, plain.k, plain.v = replace(own.rule, sinks=protect), own.q, own.k, own.v
        plain.gate_scores = own.gate_scores
        chunks = [13, 0] if impl == "reference" else [9, protect + 1, 0]
        out, lse, held, _ = Pool([own]).serve(chunks, impl)
        same, other, kept, _ = Pool([plain]).serve(chunks, impl)
        assert all(torch.equal(held[seen], kept[seen]) for seen in held)
        torch.testing.assert_close(out, same, rtol=0, atol=2e-5)
        torch.testing.assert_close(lse, other, rtol=0, atol=2e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", ["mlstm", "mlstm-short", "mlstm-corrected", "mlstm-immediate-short"])
def test_a_tail_begun_twice_is_begun_once(case, impl):
    """Previous contents of the state do not matter; requests without a prefix or a state are left alone."""
    own = problem(case, 17)[0]
    none = Problem(case, 0, seed=own.seed)
    pools = [Pool([own, none], byte) for byte in (255, 0)]
    name = use(impl)
    for pool in pools:
        pool.chunk(0, 17, name)
        before = pool.pages.raw.clone()
        for _ in range(2):
            ops.begin_tail(
                pool.pages, pool.table, Prefix(pool.pages, pool.prefix_table, pool.tokens), rule=pool.rule, impl=name
            )
            mine = pool.table[0, 0, : pool.layout.state_blocks].long()
            others = torch.ones(len(before), dtype=torch.bool)
            others[mine] = False
            assert torch.equal(pool.pages.raw[others], before[others])
    words = pools[0].rule.scorer.state_floats
    states = [pool.pages.state[pool.table[0, 0, : pool.layout.state_blocks].long()] for pool in pools]
    first, second = (state.transpose(0, 1).flatten(1)[:, :words] for state in states)
    assert torch.equal(first, second) and first.isfinite().all()
    linear = Pool([problem("linear", 17)[0]])
    ops.begin_tail(linear.pages, linear.table, linear.prefix([0]), rule=linear.rule, impl=name)
    assert (linear.pages.raw == 255).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [2, 5])
def test_a_long_prefix_shared_among_threads(dtype, threads):
    """Several tiles, odd sizes and a head shared by threads give the results of one thread up to rounding."""
    for case in ("linear", "mlstm"):
        own = Problem(case, 1333, dtype, length=1360, heads=1, group=3, size=64, slots=64, topk=40, seed=2)
        found = []
        for number in (1, threads):
            torch._C.set_num_threads(number)
            found.append(Pool([own]).serve([1024, 320, 0], _C.isa_levels()[-1]))
        alone, shared = found
        assert all(torch.equal(alone[2][seen], shared[2][seen]) for seen in alone[2])
        assert not torch.equal(alone[0][1344:], shared[0][1344:]), "no head was cut"
        atol = 2e-5 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(shared[0], alone[0], rtol=0, atol=atol)
        torch.testing.assert_close(shared[1], alone[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("start", [18, 29, 31])
def test_a_step_out_of_order_behind_a_prefix_is_refused(impl, start):
    """The refusal comes before anything is written; at or below the prefix's end any step may start."""
    own = problem("mlstm", 17)[0]
    pool = Pool([own])
    pool.chunk(0, 30, impl)
    before = pool.pages.raw.clone()
    at = dict(rule=own.rule, scale=own.scale, prefix=pool.prefix([0]), impl=impl)
    with pytest.raises(ops.StepOrderError, match=f"starts at position {start}, but its cache has seen 30"):
        cut = slice(start, start + 4)
        ops.prefill_chunk(own.q[cut], own.k[cut], own.v[cut], pool.pages, pool.table[0], start, pool.budgets[0], **at)
    with pytest.raises(ops.StepOrderError, match=f"starts at position {start}, but its cache has seen 30"):
        token = own.q[:1], own.k[:1], own.v[:1]
        ops.decode_step(*token, pool.pages, pool.table, torch.tensor([start]), pool.budgets, **at)
    assert torch.equal(pool.pages.raw, before)


def test_bad_prefixes_are_refused_before_anything_is_written():
    own = problem("mlstm", 17)[0]
    pool = Pool([own])
    pool.chunk(0, 20, "cpp")
    before = pool.pages.raw.clone()
    short, far = pool.prefix_table[:, :1], pool.prefix_table.clone()
    far[0, 1] = len(before)
    negative = torch.full_like(pool.prefix_table, -1)
    for table, tokens, error, message in (
        (short, pool.tokens, IndexError, "its prefix table has 1 entries, 2 are needed"),
        (far, pool.tokens, IndexError, f"prefix block {len(before)} is not one of"),
        (negative, pool.tokens, IndexError, "prefix block -1 is not one of"),
        (pool.prefix_table, torch.tensor([-1]), ValueError, "a prefix of -1 tokens is out of range"),
        (pool.prefix_table, torch.tensor([2**31]), ValueError, "a prefix of 2147483648 tokens is out of range"),
        (pool.prefix_table[0], pool.tokens, ValueError, "the prefix table must be"),
        (pool.prefix_table.long(), pool.tokens, (TypeError, ValueError), "prefix table"),
        (pool.prefix_table, pool.tokens.int(), (TypeError, ValueError), "prefix tokens"),
        (pool.prefix_table, torch.tensor([17, 17]), ValueError, "prefix tokens"),
    ):
        prefix = Prefix(pool.pages, table, tokens)
        token = own.q[20:21], own.k[20:21], own.v[20:21]
        rest = dict(rule=own.rule, scale=own.scale, prefix=prefix, impl="cpp")
        with pytest.raises(error, match=message):
            ops.decode_step(*token, pool.pages, pool.table, torch.tensor([20]), pool.budgets, **rest)
        if int(tokens.max()) == 17 and table.dim() == 2 and table.dtype is torch.int32:
            with pytest.raises(error, match=message):
                ops.begin_tail(pool.pages, pool.table, prefix, rule=own.rule, impl="cpp")
    rest = dict(rule=own.rule, scale=own.scale, prefix=pool.prefix([0]), impl="cpp")
    with pytest.raises(IndexError, match="entries"):
        table = pool.table[..., :1]
        ops.decode_step(*token, pool.pages, table, torch.tensor([20]), pool.budgets, **rest)
    assert torch.equal(pool.pages.raw, before)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_a_step_below_the_end_needs_the_blocks_up_to_it_only(impl):
    """A prompt in chunks has blocks only as far as it is scheduled, and none of its tail's."""
    own = Problem("mlstm", 33)
    pool = Pool([own])
    whole = Pool([own]).serve([17, 0], impl if impl == "reference" else _C.isa_levels()[-1])
    table = pool.prefix_table.clone()
    pool.prefix_table[0, 2:] = -1
    kept, pool.table = pool.table, torch.full_like(pool.table, -1)
    for count in (17, 0):
        out, _ = pool.chunk(0, count, impl) if count else pool.decode([0], impl)
        torch.testing.assert_close(out, whole[0][pool.seen[0] - len(out) : pool.seen[0]], rtol=0, atol=2e-5)
    pool.prefix_table, pool.table = table, kept
    found = pool.serve([0], impl if impl == "reference" else _C.isa_levels()[-1])
    torch.testing.assert_close(found[0], whole[0][18:], rtol=0, atol=2e-5)
