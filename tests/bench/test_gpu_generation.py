"""Generation of `make gpu`, run without a GPU: errors it detects, caches it skips, lines it prints."""

from __future__ import annotations

import csv
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import gpu_generation as generation
import gpu_generation_checks as checks
import pytest
import torch
from gpu import Case, run_case


def test_logits_are_compared_after_the_same_token(on_cpu, monkeypatch):
    """Logits are compared after the same token, because a mask may decide a near-tie differently."""

    class Rounds(checks.Decoding):
        def step(self):
            super().step()
            if "attention_mask" in self.options:
                self.tokens.copy_(self.tokens + 1).remainder_(256)

    monkeypatch.setattr(checks, "Decoding", Rounds)
    assert [row["value"] for row in checks.dense_right(on_cpu)] == ["0"]


def test_full_caches_are_the_same_every_time(on_cpu):
    with checks.tiny(on_cpu) as (model, *_):
        one, other = (checks.full_cache(model, 2, 20)[0].layers for _ in range(2))
    assert all((a.keys == b.keys).all() and (a.values == b.values).all() for a, b in zip(one, other, strict=True))


def test_passes_are_computed_as_generate_does(on_cpu, monkeypatch):
    """The output layer gets one position per row."""
    shapes, tiny = set(), checks.tiny

    @contextmanager
    def watched(bench):
        with tiny(bench) as (model, *more):
            model.lm_head.register_forward_pre_hook(lambda layer, inputs: shapes.add(inputs[0].shape[:2]))
            yield model, *more

    monkeypatch.setattr(checks, "tiny", watched)
    assert [row["value"] for row in checks.kvpop_right(on_cpu)] == ["0"]
    assert shapes == {(2, 1)}


def test_a_pass_that_does_not_see_a_cache_fill_up_is_found(on_cpu, monkeypatch):
    """A captured pass that never uses more slots than were filled at capture is detected."""
    from kvpop_vllm.hf.layer import LayerPages

    decode, frozen = LayerPages.decode, []

    class Graph(checks.Decoding):
        def captured(self, bench):
            replay = super().captured(bench)
            frozen.append(max(checks.PROMPTS))
            return replay

    def not_filling(self, *told):
        batch = decode(self, *told)
        return replace(batch, budgets=batch.budgets.clamp_max(*frozen)) if frozen else batch

    monkeypatch.setattr(checks, "Decoding", Graph)
    monkeypatch.setattr(LayerPages, "decode", not_filling)
    with pytest.raises((AssertionError, ValueError)):
        list(checks.kvpop_right(on_cpu))


def spec(seconds, broken=False):
    def check():
        assert not broken, "logits are not finite"

    return generation.Timed(lambda: seconds, 1 << 30, 1 << 29, 3 << 30, check)


def test_a_cache_that_fails_or_does_not_fit_costs_no_other(monkeypatch, on_cpu, said, results):
    """One cache cannot be made, one gives wrong results, one does not fit, and one is still timed."""
    bench, (path, about) = replace(on_cpu, dtype=torch.bfloat16), results
    shape = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=8, head_dim=128)
    drawn = SimpleNamespace(model=SimpleNamespace(config=shape), read=1 << 30)

    def dense(bench, drawn, requests, context, name, made):
        made.append("a cache")
        if name == "dense":
            raise RuntimeError("expanded size must match")
        return spec(0.002)

    def kvpop(bench, drawn, requests, context, budget):
        return spec(0.001, broken=True)

    for name, stand_in in {
        "dense_timed": dense,
        "kvpop_timed": kvpop,
        "bandwidth": lambda: 1e12,
        "paired": lambda runs, rounds: {key: run() for key, run in runs.items()},
    }.items():
        monkeypatch.setattr(generation, name, stand_in)
    names, found = [*generation.DENSE, *generation.KVPOP], {}

    def run(bench):
        return generation.times(bench, drawn, 1, 16384, names, found)

    assert run_case(bench, "generation", Case("a", run), path, about) == "wrong"
    rows = list(csv.DictReader(path.open(newline="")))
    assert [row["measure"] for row in rows] == [
        f"dense, no mask, {what}" for what in ("a token", "tokens a second", "cache", "peak memory while decoding")
    ]
    assert found.keys() == {16384} and found[16384].keys() == {"dense, no mask"}
    [line] = [line for line in said if line.startswith("generation, a: WRONG")]
    assert "dense: RuntimeError: expanded size must match" in line
    assert all(f"{name}: AssertionError: logits are not finite" in line for name in generation.KVPOP)
    monkeypatch.setattr(generation, "kvpop_timed", lambda *told: spec(0.001))
    monkeypatch.setattr(generation, "free", lambda bench: (4 << 30) + (1 << 25))
    rows = list(generation.times(bench, drawn, 1, 16384, names, found))
    skipped = {row["measure"]: (row["value"], row["unit"]) for row in rows if "skipped" in row["measure"]}
    assert skipped == {f"{name}, skipped, memory that must be free": ("4.0625", "GiB") for name in generation.DENSE}
    assert found[16384].keys() == set(generation.KVPOP)


def test_what_is_wrong_of_one_cache_does_not_stop_the_others(on_cpu, monkeypatch):
    asked = []

    def times(bench, names, **more):
        asked.append(names)
        return iter(())

    monkeypatch.setattr(generation, "times", times)
    for kind, others in {"dense": generation.KVPOP, "kvpop": generation.DENSE}.items():
        on_cpu.wrong = {f"a captured pass is right, {kind}"}
        cases = [case for case in generation.generation(on_cpu) if case.name.startswith("generation, ")]
        for case in cases:
            case.run(on_cpu)
        assert len(cases) == 5 and asked == [[*others]] * 5
        asked.clear()


def test_what_is_said_of_contexts():
    """The summary says whether latency grows with context and from where on KVpop is faster than dense."""

    def measured(*milliseconds, context):
        sizes = context, context, context // 4, 4096
        return {
            name: generation.Timed(None, size, 0, 0, None, each)
            for name, size, each in zip((*generation.DENSE, *generation.KVPOP), sizes, milliseconds, strict=True)
            if each
        }

    found = {
        131072: measured(30, 9, 7.5, 6.2, context=131072),
        16384: measured(8, 6, 6.1, 6.1, context=16384),
        65536: measured(18, 7.5, 6.9, 6.2, context=65536),
        32768: measured(12, 6.4, 6.5, 6.1, context=32768),
    }
    assert list(generation.in_short(found)) == [
        "dense: from 16384 to 131072 tokens the cache grows 8.00 times, latency 3.75 times: not flat",
        "dense, no mask: from 16384 to 131072 tokens the cache grows 8.00 times, latency 1.50 times: not flat",
        "kvpop, 75% off: from 16384 to 131072 tokens the cache grows 8.00 times, latency 1.23 times: not flat",
        "kvpop, B 4096: from 16384 to 131072 tokens the cache grows 1.00 times, latency 1.02 times: flat",
        "kvpop, 75% off: ahead of dense from 65536 tokens on",
        "kvpop, B 4096: ahead of dense from 32768 tokens on",
    ]
    found = {16384: measured(8, 6, 6.1, 6.1, context=16384), 32768: measured(0, 0, 6.5, 6.1, context=32768)}
    said = list(generation.in_short(found))
    assert said[0] == "dense: 1 contexts measured, which says nothing of growth"
    assert said[-1] == "kvpop, B 4096: not ahead of dense at the longest context measured"
    assert list(generation.in_short({}))[-1] == "kvpop, B 4096: not compared with dense"
