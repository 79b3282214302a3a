"""Every policy with every allocator and every correction, at the level of the cache.

Retained sets, outputs and log-sum-exps equal those of the naive oracle, or the combination is refused.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from policies.matrix import ROWS, Row, allocated, random_scorer_folder
from threads import one_thread

from kvpop_vllm import policies
from kvpop_vllm.attention.shifted_scores import shift
from kvpop_vllm.attention.step_batch import FixedBudgetAttention, RequestSettings, StepBatch, tail_tables
from kvpop_vllm.config import ALLOCATORS, CORRECTIONS, ConfigError, PolicySettings
from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.kernels import dispatch, ops
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.regions import RegionMap
from kvpop_vllm.kernels.retained import held_tokens
from kvpop_vllm.policies.base import ModelShape
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import Signals
from kvpop_vllm.testing import (
    LayerDecisions,
    OraclePolicy,
    assert_within_budget,
    eager_runs,
    masked_lse,
    write_tiny_model,
)

LAYERS, HEADS, GROUP, SIZE, HIDDEN = 2, 2, 2, 16, 32
BUDGET, LENGTH = 24, 72
CHUNKS = [1, 17, 25, 7, *[1] * 22]
"""Tokens of each chunk of a prompt, then decode steps."""
MODEL = ModelShape("llama", LAYERS, HEADS, SIZE, LENGTH, HIDDEN, HEADS * GROUP)
NAMES = [name for name, row in ROWS.items() if row.allocator == "uniform" and not row.compresses]
"""Policies that evict from the first token on. The others are tested in tests/engine/test_compression.py."""
COMBINATIONS = list(itertools.product(NAMES, [name for name in ALLOCATORS if name != "ada"], CORRECTIONS))


@pytest.fixture(scope="module", autouse=True)
def few_threads():
    with one_thread():
        yield


def test_every_policy_has_a_row():
    lacking = set(policies.POLICIES) - {row.policy or name for name, row in ROWS.items()}
    assert not lacking, f"give {', '.join(sorted(lacking))} a row in ROWS of tests/policies/matrix.py"


def test_rows_say_what_policies_do_unasked():
    for name, row in ROWS.items():
        cls = policies.get(row.policy or name)
        assert (cls.default_allocator, cls.default_correction == "moment") == (row.own_allocator, row.corrected), name
        assert cls.compresses == row.compresses, name
        assert (cls.scorer_kind, cls.keeps_all) == (row.scorer if row.learned else None, row.keeps_all), name


def refusal(row: Row, allocator: str, correction: str) -> str | None:
    """Return the expected error of a combination that is refused by definition, or None."""
    if row.keeps_all and correction != "none":
        return "keeps every token: leave --kv-correction out"
    if row.keeps_all and allocator != "uniform":
        return "keeps every token: leave --kv-allocator out"
    return None


class NearTie(Exception):
    """A decision so close that rounding may change it."""


class Tokens(NamedTuple):
    """Inputs of one layer.

    Attributes:
        q: ``[Hq, S, D]``.
        k: ``[H, S, D]``.
        v: ``[H, S, D]``.
        hidden: ``[S, E]``, the input of the attention block.
        channel: ``[H, S]``, a query channel.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    hidden: torch.Tensor
    channel: torch.Tensor

    def to(self, dtype: torch.dtype) -> Tokens:
        return Tokens(*(x.to(dtype) for x in self))


@functools.cache
def tokens(layer: int) -> Tokens:
    """Return the inputs of one layer, whose heads differ and whose key norms tie.

    Keys of the second head are larger, so that the heads attend to different tokens. Every third key has the
    same norm, in both heads, so that norms tie.
    """
    draw = torch.Generator().manual_seed(10 + layer)
    q, k, v = (torch.randn(n, LENGTH, SIZE, generator=draw) for n in (HEADS * GROUP, HEADS, HEADS))
    k, v = 0.6 * k, 0.6 * v
    k[1] *= 1.5
    one = 2.7 * k[0, 0] / k[0, 0].norm()
    for i, t in enumerate(range(0, LENGTH, 3)):  # all keys differ
        k[:, t] = one.roll(i) if i < SIZE else -one.roll(i)
    return Tokens(q, k, v, torch.randn(LENGTH, HIDDEN, generator=draw), torch.randn(HEADS, LENGTH, generator=draw))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """Return a function from the name of a row to its scorer folder, or None."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"), head_dim=SIZE, hidden=HIDDEN, vocab=16)

    @functools.cache
    def folder(name: str) -> str | None:
        row = ROWS[name]
        options = {"sinks": 2, "window": 5, "topk": BUDGET - 7} | row.options | row.spread
        return (
            str(random_scorer_folder(tmp_path_factory.mktemp(name), model, row.scorer, **options))
            if row.learned
            else None
        )

    return folder


def policy(name: str, folder: str | None, allocator: str, correction: str) -> policies.Policy:
    """Build a policy in the same way as an engine."""
    row = ROWS[name]
    asked = {"sinks": row.sinks, "window": row.window} if row.asked else {}
    asked |= {"scorer": folder, "allocator": allocator, "correction": correction}
    if not row.keeps_all:
        asked["budget"] = BUDGET
    return policies.get(row.policy or name)(PolicySettings.parse({"policy": row.policy or name} | asked), MODEL)


def decide(own: OraclePolicy, layer: int, dtype: torch.dtype, forced: torch.Tensor | None = None) -> LayerDecisions:
    q, k, v, hidden, channel = tokens(layer).to(dtype)
    return own.decide(layer, q, k, v, forced, hidden=hidden, channel=channel)


@pytest.fixture(scope="module")
def oracle(scorer):
    """Return ``(name, allocator, p) -> (oracle policy, [visible [H, S, S] per layer])``."""

    @functools.cache
    def found(name: str, allocator: str, protect: int = 0) -> tuple[OraclePolicy, list[torch.Tensor]]:
        row, folder = ROWS[name], scorer(name)
        window = BUDGET // 2 if row.window < 0 else row.window
        if row.keeps_all:
            own = OraclePolicy.full()
        elif row.learned:
            own = OraclePolicy.from_scorer(folder)
        else:
            own = OraclePolicy(row.scorer, row.sinks, window, BUDGET - row.sinks - window)
        own, layers = replace(allocated(own, allocator), protect=protect), []
        for layer in range(LAYERS):
            exact = decide(own, layer, torch.float64)
            low = decide(own, layer, torch.float32, exact.visible)
            bound = 8 * float((exact.scores - low.scores.double()).nan_to_num().abs().max())
            smallest = float(exact.margins[exact.margins != 0].min())  # exact ties do not depend on rounding
            if smallest <= bound:
                raise NearTie(f"{name}, {allocator}: a margin of {smallest:.1e} below {bound:.1e}, choose another seed")
            layers.append(exact.visible)
        return own, layers

    return found


@pytest.fixture(scope="module")
def expected(oracle):
    """Return ``(name, allocator, correction, p) -> [expected values per layer]``.

    These are the visible sets, and outputs and log-sum-exps in float64 and from eager float32 runs.
    """

    @functools.cache
    def found(name: str, allocator: str, correction: str, protect: int = 0) -> list[tuple]:
        own, layers = oracle(name, allocator, protect)
        own, both = replace(own, corrected=correction == "moment"), []
        for layer, visible in enumerate(layers):
            exact, low = tokens(layer).to(torch.float64), tokens(layer)

            def outputs(x, visible=visible):
                return own.attend(x.q, x.k, x.v, visible), masked_lse(x.q, x.k, visible)

            both.append(
                (visible, *zip(outputs(exact), eager_runs(functools.partial(outputs, low), count=1), strict=True))
            )
        return both

    return found


@pytest.fixture
def logged(monkeypatch):
    """Return a list that collects the log-sum-exps ``[tokens, Hq]`` of all kernel calls."""
    seen = []

    def noting(run):
        def call(*args, **options):
            out, lse = run(*args, **options)
            seen.append(lse)
            return out, lse

        return call

    for op in ("prefill_chunk", "decode_step"):
        monkeypatch.setattr(ops, op, noting(getattr(ops, op)))
    return seen


class InRegions(LayerRows):
    """Rows whose layers share the blocks of a request, as with unequal shares in an engine."""

    def share(self, layer: int, regions: RegionMap, storage: torch.Tensor, row: torch.Tensor) -> None:
        """Use pages of one layer in a pool of all layers.

        Args:
            layer: number of the layer.
            regions: map from the pages of all layers to regions.
            storage: bytes of the pool.
            row: ``[1, W]`` int32, the request's blocks, prefix blocks first.
        """
        self.layer, self.regions, self.row = layer, regions, row
        self.pages = regions.view(storage)
        own = storage.view(LAYERS, regions.num_blocks, HEADS, regions.layout.region_bytes)[layer]
        self.blocks = regions.layout.view(own)

    def append(self, q, k, v, gate_scores=None):
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        gate_scores, out = None if gate_scores is None else gate_scores[0], torch.empty_like(q)
        sizes, layout = RequestSettings(self.protected, seeds=self.sequence_lengths.seeds), self.regions.layout
        retention = Retention(int(self.budgets.max()), self.rule.sinks, self.rule.window)
        asked = [len(q)], torch.tensor([self.seen + len(q)]), self.row, sizes
        batch = StepBatch.build(layout, retention, *asked, self.regions, self.layer)
        if self.shifted:
            gate_scores = shift(gate_scores, self.pages, batch, self.rule.sinks)
        attention = FixedBudgetAttention(layout, self.rule, self.attention.scale)
        attention.forward(q, k, v, self.pages, batch, out, gate_scores, self.blocks)
        self.seen += len(q)
        return out.transpose(0, 1)[None]

    def held_by_rows(self) -> torch.Tensor:
        tail = self.regions.place(self.layer, tail_tables(self.row, self.protected, self.regions.layout))[1][0]
        return held_tokens(self.pages, tail, self.seen, self.rule, self.budgets[0], self.protected[0])[None]


def empty_rows(own: policies.Policy, protect: int = 0) -> list[LayerRows]:
    """Return empty caches of all layers in pages full of NaN, with shared blocks where shares are unequal."""
    found, heads = [], slice(0, HEADS)
    shares = own.checked_shares(heads)
    kind = LayerRows if shares is None else InRegions
    sizes = {"shifted": own.shifted, "protected": protect}
    for layer in range(LAYERS):
        rule, budgets = own.layer_rule(layer, heads), own.shares()[layer]
        found.append(kind(rule, budgets, tokens(layer).k[None], SIZE**-0.5, **sizes))
        found[-1].pages.raw.fill_(255)
    if shares is not None:
        layout = PageLayout(HEADS, SIZE, torch.float32, 16, own.state_floats)
        blocks = cdiv(protect, 16) + shares.blocks(layout.state_blocks, 16, LENGTH - protect)
        regions = RegionMap(shares, layout, blocks + 2)
        storage = torch.full((LAYERS * (blocks + 2) * HEADS * layout.region_bytes,), 255, dtype=torch.uint8)
        row = torch.arange(blocks, 0, -1, dtype=torch.int32).view(1, -1)
        for layer, rows in enumerate(found):
            rows.share(layer, regions, storage, row)
    return found


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("name, allocator, correction", COMBINATIONS, ids=lambda x: x)
def test_product(scorer, expected, logged, monkeypatch, name, allocator, correction, impl):
    if (reason := refusal(ROWS[name], allocator, correction)) is not None:
        with pytest.raises(ConfigError) as caught:
            policy(name, scorer(name), allocator, correction)
        assert str(caught.value) == f"--kv-policy {ROWS[name].policy or name} {reason}"
        return
    own = policy(name, scorer(name), allocator, correction)
    monkeypatch.setattr(dispatch, "select", lambda op, tensor: impl)
    compare(own, expected(name, allocator, correction), empty_rows(own), logged)


PROTECTED = [1, 9, 15, 16, 17, 23, 24, 25, 40]
"""Numbers of protected tokens. Only 1 ends at the end of a chunk; all others end inside one."""
SERVED = [each for each in COMBINATIONS if refusal(ROWS[each[0]], *each[1:]) is None]


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("name, allocator, correction", SERVED, ids=lambda x: x)
def test_product_with_protected_prompts(scorer, expected, logged, monkeypatch, name, allocator, correction, impl):
    """Every combination is compared at two lengths of `PROTECTED` where rounding decides nothing."""
    own = policy(name, scorer(name), allocator, correction)
    monkeypatch.setattr(dispatch, "select", lambda op, tensor: impl)
    at, tried = SERVED.index((name, allocator, correction)), 0
    for i in range(len(PROTECTED)):
        protect = PROTECTED[(at + 4 * i) % len(PROTECTED)]
        try:
            right = expected(name, allocator, correction, protect)
        except NearTie:
            continue
        compare(own, right, empty_rows(own, protect), logged)
        tried += 1
        if tried == 2:
            return
    raise AssertionError("rounding may decide with too many of these prompts: choose another seed")


@pytest.mark.parametrize("protect", [0, 1, 2, 3, 40])
def test_full_never_evicts(protect):
    """Not even behind a prompt that is shorter than the usual sinks."""
    for layer, rows in enumerate(empty_rows(policy("full", None, "uniform", "none"), protect)):
        rows.append(*(x[None] for x in tokens(layer)[:3]))
        assert rows.held_by_rows().all()


def compare(own, expected, empty, logged):
    """Serve all tokens of each layer in chunks and compare held tokens, outputs and log-sum-exps."""
    for layer, rows in enumerate(empty):
        seen, (visible, outs, masses) = tokens(layer), expected[layer]
        gate, gate_scores = own.gate(layer, slice(0, HEADS)), None
        if gate is not None:
            k, v = (x.transpose(0, 1) for x in (seen.k, seen.v))
            gate_scores = gate(Signals(seen.hidden, k, v, seen.channel.T)).detach()
        parts = []
        logged.clear()
        for chunk in CHUNKS:
            cut = slice(rows.seen, rows.seen + chunk)
            scores = None if gate_scores is None else gate_scores[None, cut]
            parts.append(rows.append(*(x[None, :, cut] for x in seen[:3]), scores)[0])
            assert torch.equal(rows.held_by_rows()[0], visible[:, cut.stop - 1, : cut.stop]), f"layer {layer}, {cut}"
        assert_within_budget(torch.cat(parts, 1).transpose(0, 1).flatten(1), *outs, name=f"layer {layer} out")
        assert_within_budget(torch.cat(logged), *masses, name=f"layer {layer} lse")
