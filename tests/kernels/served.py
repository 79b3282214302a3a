"""Whole requests in pages: any implementation serves them in chunks and decode steps."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from kernels.factories import given_scores, poisoned_pages
from kernels.problems import CLOSE, CLOSE_MASS, ExactRun, Problem

from kvpop_vllm.cache.chunks import Chunks
from kvpop_vllm.kernels import ops
from kvpop_vllm.rules.retained import held_tokens
from kvpop_vllm.testing import DisturbedSums, assert_within_budget

try:
    from kvpop_vllm import _C
except ImportError:  # as on a machine with a GPU, for `make gpu`
    _C = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ISAS = _C.isa_levels() if _C else []
IMPLS = ["triton"] if INTERPRETED else ["reference", *ISAS]
"""Torch and C++ with each instruction set of this machine, or Triton's kernels if they are interpreted."""


def use(impl: str) -> str:
    """Select an implementation, by the name of an instruction set if it is C++, and return its name for ops."""
    if impl not in ISAS:
        return impl
    _C.set_isa(impl)
    return "cpp"


class Served(NamedTuple):
    """Results of a request.

    Attributes:
        out: ``[L, Hq, D]``.
        lse: ``[L, Hq]``.
        retained: by length, the mask ``[H, length]`` of the retained tokens.
        in_cpp_chunks: ``[L]``, mask of the tokens that came in chunks of the C++ kernel.
    """

    out: torch.Tensor
    lse: torch.Tensor
    retained: dict[int, torch.Tensor]
    in_cpp_chunks: torch.Tensor

    def after(self, start: int) -> Served:
        """Return the results of the tokens from ``start`` on."""
        retained = {count: tokens for count, tokens in self.retained.items() if count > start}
        return Served(self.out[start:], self.lse[start:], retained, self.in_cpp_chunks[start:])


class Pool:
    """Pages of a problem's requests, which begin with all bytes equal, and the tokens that they have seen."""

    def __init__(self, p: Problem, byte: int = 255):
        self.p, self.byte, self.lengths = p, byte, [0] * p.requests
        self.pages = poisoned_pages(p.layout, p.num_blocks)
        self.pages.raw.fill_(byte)
        self.table, self.budgets = p.table, p.budgets

    def prefix(self, requests: list[int]):
        """Return the prefixes, or None if all are empty, which tests calls without the argument."""
        return self.p.prefix(self.pages, requests) if any(map(self.p.protects, requests)) else None

    def begin(self, r: int, count: int, impl: str) -> slice:
        """Write protected tokens and build the scorer's state, as before a step; return the step's tokens."""
        p, cut = self.p, slice(self.lengths[r], self.lengths[r] + count)
        _, k, v = (x[r][cut] for x in p.texts)
        p.write(self.pages, [r] * len(k), range(cut.start, cut.start + len(k)), k, v)
        if p.protects(r) and cut.start <= p.protects(r) < cut.stop:
            p.begin(self.pages, [r], use(impl))
        self.lengths[r] = cut.stop
        return cut

    def common_args(self, r: int, impl: str) -> dict:
        """Return the arguments of any step; the rule has another window than the requests, whose own counts."""
        rule = replace(self.p.rule, window=self.p.rule.window + 3)
        return dict(rule=rule, scale=self.p.scale, sink_logits=self.p.sink_logits, impl=use(impl))

    def chunk(self, r: int, count: int, impl: str):
        """Serve the next tokens of a request in one chunk."""
        return self.chunks({r: count}, impl)

    def chunks(self, counts: dict[int, int], impl: str):
        """Serve the next tokens of several requests, a chunk of each, in one call."""
        p, requests = self.p, list(counts)
        cuts = [self.begin(r, count, impl) for r, count in counts.items()]
        q, k, v = (torch.cat([x[r][cut] for r, cut in zip(requests, cuts, strict=True)]) for x in p.texts)
        options = dict(gate_scores=given_scores(p.rule, k), prefix=self.prefix(requests))
        if p.rule.draws:
            options["seeds"] = p.seeds[requests]
        chunk_args = (
            [cut.start for cut in cuts],
            list(counts.values()),
            self.budgets.cpu()[requests],
            p.windows.cpu()[requests].tolist(),
        )
        place = self.pages, self.table[requests], Chunks(*chunk_args)
        return ops.prefill_chunk(q, k, v, *place, **options, **self.common_args(requests[0], impl))

    def decode(self, requests: list[int], impl: str):
        """Advance these requests by one token each, in one step."""
        p, positions = self.p, [self.begin(r, 1, impl).start for r in requests]
        q, k, v = (torch.stack([x[r][t] for r, t in zip(requests, positions, strict=True)]) for x in p.texts)
        options = dict(gate_scores=given_scores(p.rule, k), windows=p.windows[requests], prefix=self.prefix(requests))
        if p.rule.draws:
            options["seeds"] = p.seeds[requests]
        place = self.pages, self.table[requests], torch.tensor(positions), self.budgets[requests]
        return ops.decode_step(q, k, v, *place, **options, **self.common_args(requests[0], impl))

    def verify(self, counts: dict[int, int], impl: str, right: dict[int, int] | None = None):
        """Advance these requests by one token each and verify so many drafts, or with -1 commit staged ones alone.

        The first ``right[r]`` drafts of a request, by default all, are its next tokens; the others are not.

        Returns:
            Outputs and log-sum-exps, and queries, keys and values, of all tokens.
        """
        p, requests, tokens = self.p, list(counts), []
        for r, count in counts.items():
            cut = slice(self.lengths[r], self.lengths[r] + count + 1)
            tokens.append(self.drafted(r, cut, count if right is None else right[r]))
            if p.protects(r) and cut.start <= p.protects(r) < cut.stop:
                p.begin(self.pages, [r], use(impl))
            self.lengths[r] += count >= 0
        q, k, v = (torch.cat(x) for x in zip(*tokens, strict=True))
        options = dict(gate_scores=given_scores(p.rule, k), windows=p.windows[requests], prefix=self.prefix(requests))
        if p.rule.draws:
            options["seeds"] = p.seeds[requests]
        lengths = torch.tensor([len(token[0]) for token in tokens])
        starts = torch.tensor([self.lengths[r] - (count >= 0) for r, count in counts.items()])
        drafts = torch.tensor(list(counts.values()), dtype=torch.int32)
        place = self.pages, self.table[requests], starts, lengths.cumsum(0) - lengths, drafts, self.budgets[requests]
        return *ops.verify_step(q, k, v, *place, **options, **self.common_args(requests[0], impl)), (q, k, v)

    def drafted(self, r: int, cut: slice, right: int) -> list[torch.Tensor]:
        """Return the tokens ``cut`` of a request, of which only the first and ``right`` more are right, and write them."""
        generator, tokens = torch.Generator().manual_seed(cut.start), [x[r][cut].clone() for x in self.p.texts]
        for x in tokens:
            x[right + 1 :] = torch.randn(x[right + 1 :].shape, generator=generator).to(x.dtype)
        self.p.write(self.pages, [r] * len(tokens[1]), range(cut.start, cut.stop), *tokens[1:])
        return tokens

    def accept(self, r: int, count: int) -> None:
        """Go on after so many of the drafts that have been verified, which are right then, also in a prefix."""
        cut = slice(self.lengths[r], self.lengths[r] + count)
        self.p.write(self.pages, [r] * count, range(cut.start, cut.stop), *(x[r][cut] for x in self.p.texts[1:]))
        self.lengths[r] += count

    def staging(self, r: int) -> torch.Tensor:
        """Return the mask ``[blocks, H, bytes]`` of the bytes of a request's pages where drafts are staged."""
        layout, mask = self.p.layout, torch.zeros(self.pages.raw.shape, dtype=torch.bool)
        for i in range(layout.drafts):
            column, byte = layout.draft_places[i]
            for h in range(self.p.heads):
                mask[int(self.table[r, h, column]), h, byte : byte + layout.draft_bytes] = True
        return mask

    def retained(self, r: int) -> torch.Tensor:
        """Return the mask of retained tokens, ``[H, length]``."""
        p, rule = self.p, replace(self.p.rule, window=int(self.p.windows[r]))
        return held_tokens(self.pages, self.table[r], self.lengths[r], rule, self.budgets[r], p.protects(r))

    def untouched(self) -> bool:
        """Return whether blocks of no request are as they were."""
        return bool((self.pages.raw[self.p.foreign()] == self.byte).all())

    def serve(self, chunks: list[int], impl: str, r: int = 0) -> Served:
        """Serve the rest of a request in ``chunks``, where 0 is a decode step and the last entry is repeated."""
        rows, retained, in_cpp_chunks, i = [], {}, [], 0
        while (left := self.p.length - self.lengths[r]) > 0:
            count = min(chunks[min(i, len(chunks) - 1)], left)
            rows.append(self.chunk(r, count, impl) if count else self.decode([r], impl))
            retained[self.lengths[r]] = self.retained(r)
            in_cpp_chunks += [bool(count) and use(impl) == "cpp"] * len(rows[-1][0])
            i += 1
        assert self.untouched(), "foreign blocks have changed"
        out, lse = (torch.cat(x) for x in zip(*rows, strict=True))
        return Served(out, lse, retained, torch.tensor(in_cpp_chunks))


def serve(p: Problem, chunks: list[int], impl: str = "reference") -> Served:
    """Serve the first request of a problem in pages of its own, see :meth:`Pool.serve`."""
    return Pool(p).serve(chunks, impl)


def check_same(actual: Served, expected: Served, atol: float = 2e-5) -> None:
    """Check that two ways of serving hold the same tokens, and give the same up to rounding."""
    common = actual.retained.keys() & expected.retained.keys()
    assert common and all(torch.equal(actual.retained[length], expected.retained[length]) for length in common)
    for a, b in zip(actual[:2], expected[:2], strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=atol)


def check_exact(p: Problem, exact: ExactRun, eager, served: Served) -> None:
    """Check that retained tokens are exact and outputs and log-sum-exps within their error budgets.

    Outputs are within their roundings (:func:`check_roundings`). In bfloat16 the log-sum-exps of tokens in
    chunks of the C++ kernel may be off by up to 2^-13.
    """
    out, lse, retained, fast = served
    for length, tokens in retained.items():
        assert torch.equal(tokens, exact.retained[:, length - 1, :length]), f"after {length} tokens"
    check_roundings(p.dtype, out, exact.out, exact.magnitude, merged=fast if merges(p) else None)
    if p.dtype == torch.bfloat16 and fast.any():
        assert (lse[fast].double() - exact.lse[fast]).abs().max() <= 2.0**-13
        lse = torch.where(fast.unsqueeze(1), exact.lse.float(), lse)
    assert_within_budget(lse, exact.lse, eager, name="lse")


def merges(p: Problem) -> bool:
    """Return whether a chunk of the C++ kernel merges rounded outputs of prefix and tail."""
    return p.protects(0) > 0 and p.dtype == p.q_dtype == torch.bfloat16


def check_roundings(dtype, out, wide, magnitude, merged: torch.Tensor | None = None) -> None:
    """Check each output against its rounding error.

    Weights rounded to the cache's dtype move it by a share of the values' magnitudes (half a unit of each
    weight, and not in their sum), and its own rounding by the same share of itself. Where the mask ``merged``
    ``[tokens]`` says so, it is merged from a prefix' and a tail's, each rounded before. Float32 sums and the
    approximated exponential move it by less than 2^-19. The smallest weights in float16, of up to 300 tokens, are wrong
    by up to 2^-25.
    """
    unit = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    smallest = 1e-6 if dtype != torch.float16 else 300 * 5 * 2.0**-25
    error = (out.double() - wide).abs()
    assert (
        error <= unit * ((1 if merged is None else 1 + merged.view(-1, 1, 1).int()) * magnitude + wide.abs()) + smallest
    ).all(), float(error.max())


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors])


class Lockstep:
    """Requests that implementations, the reference and the float64 loops follow token by token.

    Request r begins with ``starts[r]`` steps of the reference; the pages of the others begin as its pages
    then. From there on the reference's sums are disturbed.
    """

    def __init__(self, p: Problem, impls: list[str], starts: tuple[int, ...] = ()):
        self.p, self.positions, self.roundings = p, [0] * p.requests, nullcontext()
        self.comparable = True
        self.loops = [[p.exact(r, h) for h in range(p.heads)] for r in range(p.requests)]
        self.pages = {"reference": poisoned_pages(p.layout, p.num_blocks)}
        for r, start in enumerate(starts):
            for _ in range(start):
                self.step([r])
        begun = self.pages["reference"].raw
        for impl in impls:  # a clone would lie without the gaps of the sanitized cases
            self.pages[impl] = poisoned_pages(p.layout, p.num_blocks)
            self.pages[impl].raw.copy_(begun)
        self.roundings, self.outcomes = DisturbedSums(0), {name: [] for name in ("exact", *self.pages)}

    def step(self, active: list[int]) -> float | None:
        """Advance requests by one token and check the tokens that each implementation holds.

        Returns:
            None, or the margin of a decision so close that an implementation may have decided otherwise. The
            requests cannot be followed any further then.
        """
        p, now = self.p, [self.positions[r] for r in active]
        inputs, outcomes = p.inputs(active), {}
        for name, pages in self.pages.items():
            with self.roundings if name == "reference" else nullcontext():
                outcomes[name] = p.run(pages, active, now, *inputs, use(name))
        *outcomes["exact"], margins = p.exact_step(self.loops, active, now, *inputs)
        for (r, h), margin in margins.items():
            q = self.positions[r]
            expected = self.loops[r][h].long_range(q).keys()
            wrong = {name for name, pages in self.pages.items() if p.long_range(pages, r, h, q).keys() != expected}
            if wrong:
                close = CLOSE_MASS if p.rule.coupled else CLOSE
                assert margin < close, f"{wrong} retained other tokens at {q}, margin {margin}"
                self.comparable = False
                return margin
        for r in active:
            self.positions[r] += 1
        if isinstance(self.roundings, DisturbedSums):
            for name, outcome in outcomes.items():
                self.outcomes[name].append(outcome)
        return None

    def check(self) -> int:
        """Check outputs, log-sum-exps, scores, states and foreign blocks of all steps since the start.

        Returns:
            Number of scores that were compared.
        """
        p, exact, foreign = self.p, self.outcomes["exact"], self.p.foreign()
        impls = [name for name in self.pages if name != "reference"]
        for name in impls:
            assert torch.equal(self.tokens_seen(name), self.tokens_seen("reference"))
            if self.comparable:  # states that were not written are NaN
                actual, expected = self.states(name), self.states("reference")
                torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3, equal_nan=True)
            assert (self.pages[name].raw[foreign] == 255).all()
            for (out, _), (wide, _, magnitude) in zip(self.outcomes[name], exact, strict=True):
                check_roundings(p.dtype, out, wide, magnitude)
            for i, output in enumerate(("out", "lse") if exact else ()):
                values = {impl: flat(step[i] for step in self.outcomes[impl]) for impl in (name, "exact", "reference")}
                assert values[name].dtype == values["reference"].dtype
                assert_within_budget(values[name], values["exact"], values["reference"], name=f"{name} {output}")
        scores = {name: [] for name in self.outcomes}
        for r, h in ((r, h) for r in range(p.requests) for h in range(p.heads)):
            wide = self.loops[r][h].long_range(self.positions[r] - 1)
            long_range = {name: p.long_range(pages, r, h, self.positions[r] - 1) for name, pages in self.pages.items()}
            if all(slots.keys() == wide.keys() for slots in long_range.values()):  # else a close decision
                for name, actual in (long_range | {"exact": wide}).items():
                    scores[name] += [actual[t] for t in wide]
        for name in impls if scores["exact"] else ():
            wide = torch.tensor(scores["exact"], dtype=torch.float64)
            eager = torch.tensor(scores["reference"])
            assert_within_budget(torch.tensor(scores[name]), wide, eager, name=f"{name} score")
        return len(scores["exact"])

    def tokens_seen(self, name: str) -> torch.Tensor:
        """Return the numbers of tokens seen, ``[R, H]``, as the pages say."""
        rows, pages = self.p.table[:, :, self.p.layout.state_blocks].long(), self.pages[name]
        return pages.position[rows, torch.arange(self.p.heads), 0]

    def states(self, name: str) -> torch.Tensor:
        """Return the states of all heads, ``[R, H, floats]``."""
        rows, heads = self.p.table[:, :, : self.p.layout.state_blocks].long(), torch.arange(self.p.heads)
        return self.pages[name].state[rows, heads.unsqueeze(1)].flatten(2)[..., : self.p.rule.state_floats(self.p.size)]
