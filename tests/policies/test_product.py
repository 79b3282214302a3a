"""Every policy with every allocator and every correction, at the level of the cache.

Retained sets, outputs and log-sum-exps equal those of the naive oracle, or the combination is refused.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from policies.matrix import (
    ROPE,
    ROWS,
    SHARES,
    Row,
    allocated,
    force,
    made,
    random_scorer_folder,
    random_statistics_folder,
    shared_by,
)

from kvpop_vllm import policies
from kvpop_vllm.config import ALLOCATORS, CORRECTIONS, ConfigError, PolicySettings
from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.kernels import ops
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.scorers import Signals
from kvpop_vllm.testing import (
    LayerDecisions,
    OraclePolicy,
    assert_within_budget,
    eager_runs,
    masked_lse,
    write_tiny_model,
)

pytestmark = pytest.mark.usefixtures("few_threads")

LAYERS, HEADS, GROUP, SIZE, HIDDEN = 2, 2, 2, 16, 32
BUDGET, LENGTH = 24, 72
CHUNKS = [1, 17, 25, 7, *[1] * 22]
"""Tokens of each chunk of a prompt, then decode steps."""
MODEL = ModelShape("llama", LAYERS, HEADS, SIZE, LENGTH, HIDDEN, HEADS * GROUP, ROPE)
NAMES = [name for name, row in ROWS.items() if row.allocator == "uniform" and not row.compresses]
"""Policies that evict from the first token on. The others are tested in tests/engine/test_fidelity.py."""
ALLOCATED = [*(name for name in ALLOCATORS if name != "ada"), str(SHARES)]
COMBINATIONS = list(itertools.product(NAMES, ALLOCATED, CORRECTIONS))


def test_every_policy_has_a_row():
    lacking = set(policies.POLICIES) - {row.policy or name for name, row in ROWS.items()}
    assert not lacking, f"give {', '.join(sorted(lacking))} a row in ROWS of tests/policies/matrix.py"


def test_rows_say_what_policies_do_unasked():
    for name, row in ROWS.items():
        cls = policies.get(row.policy or name)
        assert (cls.default_allocator, cls.default_correction == "moment") == (row.own_allocator, row.corrected), name
        assert cls.compresses == row.compresses, name
        assert (cls.scorer_kind, cls.keeps_all) == (row.scorer if row.learned else None, row.keeps_all), name
        if not (row.learned or row.set_by_tests or row.keeps_all):
            retention, window = made(row.policy or name).retention, 32 if row.window < 0 else row.window
            assert (retention.budget, retention.sinks, retention.window) == (64, row.sinks, window), name


def refusal(row: Row, allocator: str, correction: str) -> str | None:
    """Return the expected error of a combination that is refused by definition, or None."""
    if not row.keeps_all or (correction, allocator) == ("none", "uniform"):
        return None
    first = "allocator" if correction == "none" else "correction"
    first = "calibration" if "calibration" in shared_by(allocator) else first
    return f"keeps every token: leave --kv-{first} out"


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
    """Return a function from the name of a row to the folder of its scorer or of its model's statistics, or None."""
    model = write_tiny_model(tmp_path_factory.mktemp("model"), head_dim=SIZE, hidden=HIDDEN, vocab=16)

    @functools.cache
    def folder(name: str) -> str | None:
        row = ROWS[name]
        if row.calibrated:
            return str(random_statistics_folder(tmp_path_factory.mktemp(name), MODEL))
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
    settings = {"sinks": row.sinks, "window": row.window} if row.set_by_tests else {}
    settings |= {"correction": correction} | shared_by(allocator, folder if row.calibrated else None)
    if row.learned:
        settings.update(row.early, scorer=folder)
    if not row.keeps_all:
        settings["budget"] = BUDGET
    return policies.get(row.policy or name)(PolicySettings.parse({"policy": row.policy or name} | settings), MODEL)


def sinks_of(layer: int, has_sinks: bool) -> torch.Tensor | None:
    """Return the logits of a layer's attention sinks, ``[Hq]``, or None."""
    draw = torch.Generator().manual_seed(20 + layer)
    return 3 + torch.randn(HEADS * GROUP, generator=draw) if has_sinks else None


def decide(
    oracle_policy: OraclePolicy, layer: int, dtype: torch.dtype, has_sinks: bool, forced: torch.Tensor | None = None
) -> LayerDecisions:
    q, k, v, hidden, channel = tokens(layer).to(dtype)
    sinks = sinks_of(layer, has_sinks)
    return oracle_policy.decide(layer, q, k, v, forced, hidden=hidden, channel=channel, sink_logits=sinks)


@pytest.fixture(scope="module")
def oracle(scorer):
    """Return ``(name, allocator, p, has_sinks) -> (oracle policy, [visible [H, S, S] per layer])``."""

    @functools.cache
    def found(
        name: str, allocator: str, protect: int = 0, has_sinks: bool = False
    ) -> tuple[OraclePolicy, list[torch.Tensor]]:
        row, folder = ROWS[name], scorer(name)
        window = BUDGET // 2 if row.window < 0 else row.window
        if row.keeps_all:
            oracle_policy = OraclePolicy.full()
        elif row.learned:
            oracle_policy = OraclePolicy.from_scorer(folder, **row.early)
        else:
            oracle_policy = OraclePolicy(row.scorer, row.sinks, window, BUDGET - row.sinks - window, statistics=folder)
        oracle_policy, layers = replace(allocated(oracle_policy, allocator), protect=protect), []
        for layer in range(LAYERS):
            exact = decide(oracle_policy, layer, torch.float64, has_sinks)
            low = decide(oracle_policy, layer, torch.float32, has_sinks, exact.visible)
            bound = 8 * float((exact.scores - low.scores.double()).nan_to_num().abs().max())
            smallest = float(exact.margins[exact.margins != 0].min())  # exact ties do not depend on rounding
            if smallest <= bound:
                raise NearTie(f"{name}, {allocator}: a margin of {smallest:.1e} below {bound:.1e}, choose another seed")
            layers.append(exact.visible)
        return oracle_policy, layers

    return found


@pytest.fixture(scope="module")
def expected(oracle):
    """Return ``(name, allocator, correction, p, has_sinks) -> [expected values per layer]``.

    These are the visible sets, and outputs and log-sum-exps in float64 and from eager float32 runs.
    """

    @functools.cache
    def found(name: str, allocator: str, correction: str, protect: int = 0, has_sinks: bool = False) -> list[tuple]:
        oracle_policy, layers = oracle(name, allocator, protect, has_sinks)
        oracle_policy, expected_layers = replace(oracle_policy, corrected=correction == "moment"), []
        for layer, visible in enumerate(layers):
            exact, low = tokens(layer).to(torch.float64), tokens(layer)

            def outputs(x, visible=visible, layer=layer):
                sinks = sinks_of(layer, has_sinks)
                options = {"sink_logits": None if sinks is None else sinks.to(x.q)}
                return oracle_policy.attend(x.q, x.k, x.v, visible, **options), masked_lse(x.q, x.k, visible, **options)

            expected_layers.append(
                (visible, *zip(outputs(exact), eager_runs(functools.partial(outputs, low), count=1), strict=True))
            )
        return expected_layers

    return found


@pytest.fixture
def logged(monkeypatch):
    """Return a list that collects the log-sum-exps ``[tokens, Hq]`` of all kernel calls."""
    logged_lse = []

    def noting(run):
        def call(*args, **options):
            out, lse = run(*args, **options)
            logged_lse.append(lse)
            return out, lse

        return call

    for op in ("prefill_chunk", "decode_step"):
        monkeypatch.setattr(ops, op, noting(getattr(ops, op)))
    return logged_lse


def empty_rows(tested: policies.Policy, protect: int = 0) -> list[LayerRows]:
    """Return empty caches of all layers, in pages full of NaN."""
    empty, sizes = [], {"shifted": tested.shifted, "protected": protect, "row_budget": tested.retention.budget}
    for layer in range(LAYERS):
        rule, budgets = tested.layer_rule(layer, slice(0, HEADS)), tested.shares()[layer]
        empty.append(LayerRows(rule, budgets, tokens(layer).k[None], SIZE**-0.5, **sizes))
        empty[-1].pages.raw.fill_(255)
    return empty


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("name, allocator, correction", COMBINATIONS, ids=lambda x: Path(x).name)
def test_product(scorer, expected, logged, monkeypatch, name, allocator, correction, impl):
    if (reason := refusal(ROWS[name], allocator, correction)) is not None:
        with pytest.raises(ConfigError) as caught:
            policy(name, scorer(name), allocator, correction)
        assert str(caught.value) == f"--kv-policy {ROWS[name].policy or name} {reason}"
        return
    tested = policy(name, scorer(name), allocator, correction)
    force(monkeypatch, impl)
    compare(tested, expected(name, allocator, correction), empty_rows(tested), logged)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", [name for name in NAMES if not ROWS[name].keeps_all])
def test_every_policy_with_attention_sinks(scorer, expected, logged, monkeypatch, name, correction, impl):
    """Masses, moments and what rounds rank by have the sinks in their softmax."""
    tested, right = policy(name, scorer(name), "uniform", correction), expected(name, "uniform", correction, 0, True)
    force(monkeypatch, impl)
    compare(tested, right, empty_rows(tested), logged, has_sinks=True)


READS_ATTENTION = "h2o", "tova", "momentkv", "vase", "rkv"


@pytest.mark.parametrize("name", READS_ATTENTION)
def test_policies_that_read_attention_retain_other_tokens_with_sinks(oracle, name):
    assert any(
        not torch.equal(*pair)
        for pair in zip(*(oracle(name, "uniform", 0, sinks)[1] for sinks in (True, False)), strict=True)
    )


PROTECTED = [1, 9, 15, 16, 17, 23, 24, 25, 40]
"""Numbers of protected tokens. Only 1 ends at the end of a chunk; all others end inside one."""
SERVED = [combination for combination in COMBINATIONS if refusal(ROWS[combination[0]], *combination[1:]) is None]


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("name, allocator, correction", SERVED, ids=lambda x: Path(x).name)
def test_product_with_protected_prompts(scorer, expected, logged, monkeypatch, name, allocator, correction, impl):
    """Every combination is compared at two lengths of `PROTECTED` where rounding decides nothing."""
    tested = policy(name, scorer(name), allocator, correction)
    force(monkeypatch, impl)
    first, tried = SERVED.index((name, allocator, correction)), 0
    for i in range(len(PROTECTED)):
        protect = PROTECTED[(first + 4 * i) % len(PROTECTED)]
        try:
            right = expected(name, allocator, correction, protect)
        except NearTie:
            continue
        compare(tested, right, empty_rows(tested, protect), logged)
        tried += 1
        if tried == 2:
            return
    raise AssertionError("rounding may decide with too many of these prompts: choose another seed")


@pytest.mark.parametrize("protect", [0, 1, 2, 3, 40])
def test_full_never_evicts(protect):
    """Not even after a prompt that is shorter than the usual sinks."""
    for layer, rows in enumerate(empty_rows(policy("full", None, "uniform", "none"), protect)):
        rows.append(*(x[None] for x in tokens(layer)[:3]))
        assert rows.held_by_rows().all()


def compare(tested, expected, empty, logged, has_sinks=False):
    """Serve all tokens of each layer in chunks and compare held tokens, outputs and log-sum-exps."""
    for layer, rows in enumerate(empty):
        layer_tokens, (visible, outs, masses) = tokens(layer), expected[layer]
        gate, gate_scores = tested.gate(layer, slice(0, HEADS)), None
        if gate is not None:
            k, v = (x.transpose(0, 1) for x in (layer_tokens.k, layer_tokens.v))
            gate_scores = gate(Signals(layer_tokens.hidden, k, v, layer_tokens.channel.T)).detach()
        pieces = []
        logged.clear()
        for chunk in CHUNKS:
            cut = slice(rows.tokens_seen, rows.tokens_seen + chunk)
            scores = None if gate_scores is None else gate_scores[None, cut]
            pieces.append(
                rows.append(*(x[None, :, cut] for x in layer_tokens[:3]), scores, sinks_of(layer, has_sinks))[0]
            )
            assert torch.equal(rows.held_by_rows()[0], visible[:, cut.stop - 1, : cut.stop]), f"layer {layer}, {cut}"
        assert_within_budget(torch.cat(pieces, 1).transpose(0, 1).flatten(1), *outs, name=f"layer {layer} out")
        assert_within_budget(torch.cat(logged), *masses, name=f"layer {layer} lse")
