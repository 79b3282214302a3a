"""Measurements of one row of `benchmarks/policy_table.py`.

A row is a policy at a budget, on text, on needles, and in time.
"""

import itertools
import math
import statistics
import time
from dataclasses import replace

import torch
from harness import say
from kernel_steps import Steps

from kvpop_vllm.cache.accounting import dense_request_bytes
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation import replay
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.haystack import replay_rows, sentences, units_of
from kvpop_vllm.evaluation.policies import PolicySpec
from kvpop_vllm.evaluation.retrieval import MEASURES, answers, make_examples
from kvpop_vllm.evaluation.runner import Setting
from kvpop_vllm.evaluation.tasks import CHARACTERS
from kvpop_vllm.model_shape import ModelShape, vocabulary_of

SAME = 1e-4
"""Divergence in nats a token that rounding may cause before anything is evicted."""
EQUAL_BYTES_FROM = 512
STEPS, WARM_UP = 8, 2
"""Decode steps of a turn, and before the first turn."""


class Cells:
    """Measurements of rows; model, text and needles are loaded when the first row needs them.

    Args:
        options: options of `benchmarks/policy_table.py`.

    Attributes:
        dtype: dtype of the cache that bytes and times are of.
    """

    def __init__(self, options):
        self.options, self.dtype, self.backend = options, torch.bfloat16, None

    def load(self) -> None:
        """Load model, text and needles, unless they are loaded.

        Raises:
            ConfigError: a text is too short.
        """
        if self.backend is not None:
            return
        o = self.options
        self.tokenizer = load_tokenizer(o.model_folder)
        split = {"split": "all", "seed": o.seed, "vocab_size": vocabulary_of(o.model_folder)}
        self.rows, self.units = [], []
        for path in o.data:
            rows = list(itertools.islice(replay_rows([path], self.tokenizer, o.length, **split), o.rows))
            if len(rows) < o.rows:
                raise ConfigError(f"{path} holds {len(rows)} rows of {o.length} tokens: lower --rows or --length")
            first = 1 + max(self.units, default=-1)
            self.units += [first + unit for unit in units_of(rows)]
            self.rows += [row.tokens for row in rows]
        text = sentences([o.haystack], "all", CHARACTERS * o.length)
        self.needles = make_examples(["needle"], self.tokenizer, text, o.length, o.needles, seed=o.seed, digits=4)
        # not the cache's dtype, whose rounding costs 0.002 nats, as much as some policies do
        self.backend = TransformersBackend(o.model_folder, torch.float32, o.length)
        with self.backend.start(None) as run:
            self.exact = [replay.predictions(run, row) for row in self.rows]

    def setting(self, spec, budget: int | None, equal: str):
        """Return the setting of a row, None if the row would equal another one, or is not asked for.

        Raises:
            ConfigError: the policy cannot have this budget.
        """
        if spec is None:
            return Setting(self.options.length, 0, None, None)
        if equal == "bytes" and (budget < EQUAL_BYTES_FROM or self.options.prompt):
            return None
        setting = Setting(self.options.length, budget, None, None, equal)
        resolved = self._resolve(spec, setting)
        return None if equal == "bytes" and resolved.roles.budget == budget else setting

    def _resolve(self, spec, setting):
        shape = ModelShape.of(self.options.model_folder, self.options.length)
        return setting.resolve(spec, shape, self.dtype)

    def quality(self, spec, setting, key: dict) -> dict | None:
        """Return a row of quality, or None if predictions differ before anything is evicted."""
        begin = time.monotonic()
        resolved = spec and self._resolve(spec, setting)
        values = self.read(resolved)
        if not self.passes(resolved, key, values["kl_before"]):
            return None
        about = {name: getattr(resolved.roles, name) if resolved else "" for name in ("topk", "sinks", "window")}
        about |= {"allocated_bytes": self.allocated(resolved), "state": resolved.policy.state_floats if resolved else 0}
        return self._row(key | about, values | self.needles_found(resolved), begin)

    def steps(self, spec, setting, key: dict) -> dict | None:
        """Return a row of times, or None if predictions differ before anything is evicted."""
        begin = time.monotonic()
        resolved = spec and self._resolve(spec, setting)
        before = self.read(resolved, self._held(resolved))["kl_before"]
        return self._row(key, self.speed(resolved), begin) if self.passes(resolved, key, before) else None

    def passes(self, resolved, key: dict, before: float) -> bool:
        """Return whether the policy follows the dense model while nothing has been evicted, and print a failure.

        A policy that evicts from a text that fits is not judged.

        Args:
            resolved: the policy, or None for dense.
            key: what identifies the row.
            before: divergence in nats a token.
        """
        if before <= SAME or not self.backend.held(resolved, self.rows[0][: resolved.smallest_budget]).all():
            return True
        say(f"{key['policy']}, B = {key['budget']}: output check failed, KL {before:.3f} before eviction")
        return False

    def _row(self, key: dict, values: dict, begin: float) -> dict:
        values = values | {"seconds": time.monotonic() - begin}
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if not isinstance(value, str))
        say(f"{key['policy']}, B = {key['budget'] or 'all'}, equal {key['equal']}: {shown}")
        return key | {name: value if isinstance(value, str) else f"{value:.6g}" for name, value in values.items()}

    def _held(self, resolved) -> int:
        """Return the number of first tokens of a text that every head can hold."""
        return max(2, resolved.smallest_budget) if resolved else self.options.length

    def read(self, resolved, length: int | None = None) -> dict:
        """Return means over rows of text, of ``length`` tokens or whole.

        They are ``perplexity``, ``kl`` in nats a token, and ``kl_before``, the divergence over as many tokens as every
        head can hold. ``kls`` are the divergences of the rows, ``units`` their documents.
        """
        measures, first = [], self._held(resolved)
        with self.backend.start(resolved) as run:
            for row, exact in zip(self.rows, self.exact, strict=True):
                tokens = row[:length]
                dense = exact._replace(hidden=exact.hidden[: len(tokens) - 1])
                measured = replay.predictions(run, tokens) if resolved else dense
                measures.append(replay.token_measures(measured, tokens, dense))
        kls = [row["kl"].mean().item() for row in measures]
        return {
            "perplexity": math.exp(statistics.mean(row["nll"].mean().item() for row in measures)),
            "kl": statistics.mean(kls),
            "kl_before": statistics.mean(row["kl"][: first - 1].mean().item() for row in measures),
            "kls": " ".join(f"{kl:.6g}" for kl in kls) if resolved else "",
            "units": " ".join(map(str, self.units)) if resolved else "",
        }

    def needles_found(self, resolved) -> dict:
        """Return mean ``exact`` and ``partial`` credit for needles."""
        if resolved is not None and self.options.prompt:
            spec = replace(resolved.spec, prompt=None, protect=None if resolved.policy.compresses else True)
            retention = resolved.policy.retention
            resolved = spec.resolve(resolved.model, retention.budget, retention.sinks, retention.window)
        with self.backend.start(resolved) as run:
            credits = list(answers(run, self.tokenizer, self.needles))
        return {name: statistics.mean(answer[name] for answer in credits) for name in MEASURES}

    def speed(self, resolved) -> dict:
        """Return milliseconds of a step of the kernel and of the same kernel keeping everything.

        The two are run in turn; the values are medians over rounds.
        """
        o, config = self.options, self.backend.model.config.get_text_config()
        steps = o.rounds * STEPS + WARM_UP
        shape = vars(self.backend.shape) | {"max_model_len": o.context + steps}
        full = PolicySpec("full", "full").resolve(ModelShape(**shape), None)
        sizes = (config.num_attention_heads, o.requests, o.context, steps, self.dtype)
        runs = {"dense_ms": Steps(full, *sizes)} | ({"step_ms": Steps(resolved, *sizes)} if resolved else {})
        for run in runs.values():
            run.seconds(WARM_UP)
        rounds = [{name: 1e3 * run.seconds(STEPS) for name, run in runs.items()} for _ in range(o.rounds)]
        rounds = [{"step_ms": round_["dense_ms"]} | round_ for round_ in rounds]
        over = [round_["dense_ms"] / round_["step_ms"] for round_ in rounds]
        medians = {name: statistics.median(round_[name] for round_ in rounds) for name in ("dense_ms", "step_ms")}
        return medians | {"dense_over_it": statistics.median(over), "least": min(over), "largest": max(over)}

    def allocated(self, resolved) -> int:
        """Return the bytes of a request of ``--length`` tokens, pages and state.

        For dense these are keys and values alone.
        """
        shape, length = self.backend.shape, self.options.length
        if resolved is not None:
            return resolved.request_bytes(length, self.dtype).allocated
        sizes = shape.num_layers, shape.num_kv_heads, shape.head_dim
        return dense_request_bytes(*sizes, self.dtype, length, 128).allocated
