"""Contents of a scorer's ``kvpop_config.json``, and the tensors that follow from it.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import torch

from kvpop_vllm.config import ConfigError, ScorerShape, TrainedBudget, check_head_shares
from kvpop_vllm.schemas import TEXT, Rule, Schema, integer

SCHEMA = Schema("scorer")
_INT32_MAX = 2**31 - 1
_OPTIONAL = ("trained", "shares", "layers")
"""Keys that a file may lack, all of them lists."""


WINDOWS = {"window": integer(1), "topk": integer(0)}
"""Rules of a trained budget."""


@dataclass(frozen=True)
class Decay:
    """Range and step of the decay (KVpop eq. 18).

    ``log gamma = log min + sigmoid(alpha) (log max - log min)``, applied every ``step`` tokens.
    """

    step: int = 1
    min: float = 0.999
    max: float = 0.999999


@dataclass(frozen=True, kw_only=True)
class ScorerConfig:
    """Contents of ``kvpop_config.json`` that all kinds share. The class of each kind adds its own keys.

    Attributes:
        scorer: kind, the ``scorer`` key.
        rules: rules of single values.
        model_type: model type of the base model.
        num_layers: number of layers that the scorer is for.
        num_kv_heads: H, KV heads.
        head_dim: D.
        sinks: s.
        window: w.
        topk: k, long-range slots.
        trained: budgets that the scorer was trained with if there were several. The first is the config's own
            window and topk.
        shares: ``[layers][H]``, measured parts of the long-range slots for all heads (``kvpop calibrate``), of which
            only the ratios matter, empty if heads share equally.
        layers: indices in the model of the layers that the scorer is for, empty if these are all.
    """

    scorer: ClassVar[str]
    rules: ClassVar[dict[str, Rule]] = {
        **{name: integer(1) for name in ("num_layers", "num_kv_heads", "head_dim")},
        **WINDOWS,
        "sinks": integer(0),
        "model_type": TEXT,
    }

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    sinks: int
    window: int
    topk: int
    trained: tuple[TrainedBudget, ...] = ()
    shares: tuple[tuple[float, ...], ...] = ()
    layers: tuple[int, ...] = ()

    @property
    def retention(self) -> ScorerShape:
        """Retention settings: sinks, window, long-range slots, delay, trained budgets."""
        return ScorerShape(self.sinks, self.window, self.topk, False, self.trained)

    def shapes(self, names: Collection[str] = ()) -> dict[str, tuple]:
        """Return name -> shape of one layer's tensors.

        Letters stand for sizes that the tensors determine. A tensor whose first axis is a letter is shared by
        all heads, and all others have the head axis first.

        Args:
            names: tensors that a file has, for kinds with optional tensors.
        """
        raise NotImplementedError(f"{type(self).__name__} has no shapes()")

    def of_heads(self, tensors: dict[str, torch.Tensor], heads: slice) -> dict[str, torch.Tensor]:
        """Return one layer's tensors for the KV heads ``heads``. Shared tensors are returned whole."""
        shapes = self.shapes(tensors)
        return {name: t if isinstance(shapes[name][0], str) else t[heads] for name, t in tensors.items()}

    @classmethod
    def from_json(cls, raw: Mapping, source: str) -> ScorerConfig:
        """Return the config of a JSON object of this kind.

        Args:
            raw: the object's keys other than format, version and scorer.
            source: name of the file in errors.
        """
        keys = [key.name for key in dataclasses.fields(cls)]
        values = dict(raw)
        if values.get("decide_every") == 1:  # files of an earlier version may have this key
            del values["decide_every"]
        SCHEMA.check_keys(values, keys, _OPTIONAL, source)
        SCHEMA.check(values, cls.rules, source)
        _check_trained(values, source)
        if values.get("shares", []) != []:
            check_head_shares(values["shares"], values["num_layers"], values["num_kv_heads"], source)
        cls.check(values, source)
        decay = {"decay": Decay(**values["decay"])} if "decay" in values else {}
        trained = tuple(TrainedBudget(**budget) for budget in values.get("trained", ()))
        shares = tuple(tuple(map(float, row)) for row in values.get("shares", ()))
        layers = tuple(SCHEMA.layers(values, source))
        return cls(**{**values, **decay, "trained": trained, "shares": shares, "layers": layers})

    @classmethod
    def check(cls, values: Mapping, source: str) -> None:
        """Check what rules of single values cannot."""

    def to_json(self) -> dict:
        """Return the contents of ``kvpop_config.json``."""
        values = SCHEMA.header | {"scorer": self.scorer} | asdict(self)
        # empty lists are left out, since a reader refuses keys that it does not know
        lists = {name: list(values.pop(name)) for name in _OPTIONAL}
        return values | {name: listed for name, listed in lists.items() if listed}


@dataclass(frozen=True, kw_only=True)
class DecayedConfig(ScorerConfig):
    """Config of a scorer of keys and values, whose scores decay.

    Attributes:
        decay: range and step of the decay.
    """

    decay: Decay = field(default_factory=Decay)

    @classmethod
    def check(cls, values, source):
        decay = values["decay"]
        if not isinstance(decay, Mapping) or sorted(decay) != ["max", "min", "step"]:
            raise ConfigError(f"{source}: decay must be an object with step, min and max, got {decay!r}")
        step, low, high = decay["step"], decay["min"], decay["max"]
        if not isinstance(step, int) or isinstance(step, bool) or not 1 <= step <= _INT32_MAX:
            raise ConfigError(f"{source}: decay.step must be an integer from 1 to {_INT32_MAX}, got {step!r}")
        numbers = all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in (low, high))
        if not numbers or not 0 < low <= high <= 1:
            raise ConfigError(f"{source}: decay needs 0 < min <= max <= 1, got {decay!r}")

    def shapes(self, names=()):
        return {"decay_logit": (self.num_kv_heads,)}


@dataclass(frozen=True, kw_only=True)
class GateConfig(ScorerConfig):
    """Config of a gate.

    Attributes:
        hidden_size: E, width of the model.
        reads: input of the gate: "hidden" (the attention block's input), "kv" (keys and values of all heads as
            cached) or "query" (a channel of the queries before RoPE). Each kind has some of them.
    """

    rules: ClassVar[dict[str, Rule]] = ScorerConfig.rules | {"hidden_size": integer(1)}

    hidden_size: int
    reads: str = "hidden"


def _check_trained(values: Mapping, source: str) -> None:
    budgets = values.get("trained", [])
    if not isinstance(budgets, list) or not all(
        isinstance(b, Mapping) and set(b) == {"window", "topk"} for b in budgets
    ):
        raise ConfigError(f"{source}: trained must be a list of objects with window and topk, got {budgets!r}")
    for budget in budgets:
        SCHEMA.check(budget, WINDOWS, f"{source}: trained")
    if budgets and budgets[0] != {"window": values["window"], "topk": values["topk"]}:
        raise ConfigError(
            f"{source}: trained must begin with window {values['window']} and topk {values['topk']}, got {budgets[0]!r}"
        )


def _is_positive(number: object) -> bool:
    """Return whether ``number`` is positive, finite and a normal float32, because the kernels use float32."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return torch.finfo(torch.float32).tiny <= number <= torch.finfo(torch.float32).max


POSITIVE: Rule = (_is_positive, "a positive float32 number")
