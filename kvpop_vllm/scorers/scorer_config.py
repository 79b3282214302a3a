"""Contents of a scorer's ``kvpop_config.json``, and the tensors that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

import torch

from kvpop_vllm.config import GATE_KINDS, MAX_BUDGET, SCORER_KINDS, ConfigError, ScorerShape, TrainedBudget

FORMAT, VERSION = "kvpop-scorer", 1
_INT32_MAX = 2**31 - 1
_OPTIONAL_KEYS = ("trained",)
_COMMON_KEYS = ("model_type", "num_layers", "num_kv_heads", "head_dim", "scorer", "sinks", "window", "topk")
_KEYS = {
    "mlstm": ("decay", "feature_map", "gate_softcap", "norm", "skip", "delayed"),
    "mlp": ("decay",),
    "linear": ("decay",),
    "trimkv": ("hidden_size", "reads", "gated"),
    "dms": ("hidden_size", "reads", "scale", "shifted"),
}
"""Keys of each scorer kind in addition to the common ones; all are required."""

_READS = {"trimkv": ("hidden", "kv"), "dms": ("hidden", "query")}
"""Values of ``reads`` for each kind of gate.

hidden: the attention block's input. kv: keys and values of all heads as cached. query: a channel of the
queries before RoPE.
"""

_SHARED = ("linear1.weight", "linear1.bias", "gate_proj.weight", "up_proj.weight")
"""Tensors of gates that all heads share. All other tensors have the head axis first."""


@dataclass(frozen=True)
class Decay:
    """Range and step of the decay (KVpop eq. 18).

    ``log gamma = log min + sigmoid(alpha) (log max - log min)``, applied every ``step`` tokens.
    """

    step: int = 1
    min: float = 0.999
    max: float = 0.999999


@dataclass(frozen=True)
class ScorerConfig:
    """Contents of ``kvpop_config.json``. Fields for which a kind has no key are unused.

    Attributes:
        model_type: model type of the base model.
        num_layers: number of layers.
        num_kv_heads: H, KV heads.
        head_dim: D.
        scorer: kind, one of SCORER_KINDS.
        sinks: s.
        window: w.
        topk: k, long-range slots.
        decay: range and step of the decay (mlstm, mlp, linear).
        feature_map: "hedgehog" or "softmax" (mlstm).
        gate_softcap: c of ``c * tanh(a / c)`` on the gates, or None (mlstm).
        norm: True if the memory's output is RMS-normalised (mlstm).
        skip: True if the score has a skip connection from ``[k; v]`` (mlstm).
        delayed: True if a token is read out when it leaves the window (mlstm).
        trained: budgets that the scorer was trained with if there were several; the first is the config's own
            window and topk.
        hidden_size: E, width of the model (trimkv, dms).
        reads: input of the gate: "hidden" (the attention block's input), "kv" (trimkv: keys and values of all
            heads as cached) or "query" (dms: a borrowed channel).
        gated: True if the first layer is gated (trimkv).
        scale: factor on the input of the gate (dms).
        shifted: True if the logit of token t + 1 decides about token t (dms).

    Raises:
        ConfigError: a value has the wrong type or range, from :meth:`parse`.
    """

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    scorer: str
    sinks: int
    window: int
    topk: int
    decay: Decay = field(default_factory=Decay)
    feature_map: str = "hedgehog"
    gate_softcap: float | None = None
    norm: bool = False
    skip: bool = False
    delayed: bool = True
    trained: tuple[TrainedBudget, ...] = ()
    hidden_size: int | None = None
    reads: str = "hidden"
    gated: bool = False
    scale: float = 100.0
    shifted: bool = False

    @property
    def retention(self) -> ScorerShape:
        """Retention settings: sinks, window, long-range slots, delay, trained budgets."""
        delayed = self.scorer == "mlstm" and self.delayed
        return ScorerShape(self.sinks, self.window, self.topk, delayed, self.trained)

    @classmethod
    def parse(cls, raw: object, source: str) -> ScorerConfig:
        """Check a decoded JSON object and return it as a config; ``source`` names it in errors.

        Raises:
            ConfigError: wrong format or version, unknown or missing keys, or invalid values.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{source} must hold a JSON object")
        if raw.get("format") != FORMAT or raw.get("version") != VERSION:
            raise ConfigError(
                f"{source} says format {raw.get('format')!r} version {raw.get('version')!r}; this kvpop_vllm reads {FORMAT!r} version {VERSION}"
            )
        if raw.get("scorer") not in SCORER_KINDS:
            raise ConfigError(f"{source}: scorer must be one of {', '.join(SCORER_KINDS)}, got {raw.get('scorer')!r}")
        required = _COMMON_KEYS + _KEYS[raw["scorer"]]
        given = {key: value for key, value in raw.items() if key not in ("format", "version")}
        if given.get("decide_every") == 1:  # files of an earlier version may have this key
            del given["decide_every"]
        if unknown := sorted(set(given) - {*required, *_OPTIONAL_KEYS}):
            raise ConfigError(f"{source}: unknown key {unknown[0]!r}")
        if missing := [key for key in required if key not in given]:
            raise ConfigError(f"{source}: key {missing[0]!r} is missing")
        _check_values(given, source)
        trained = tuple(TrainedBudget(**budget) for budget in given.get("trained", ()))
        decay = {"decay": Decay(**given["decay"])} if "decay" in given else {}
        return cls(**{**given, **decay, "trained": trained})

    def to_json(self) -> dict:
        """Return the contents of ``kvpop_config.json``."""
        keys = _COMMON_KEYS + _KEYS[self.scorer] + (("trained",) if self.trained else ())
        values = asdict(self) | {"trained": [asdict(budget) for budget in self.trained]}
        return {"format": FORMAT, "version": VERSION, **{k: v for k, v in values.items() if k in keys}}


def _check_values(given: Mapping, source: str) -> None:
    least = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "sinks": 0, "window": 1, "topk": 0}
    if given["scorer"] in GATE_KINDS:
        least["hidden_size"] = 1
    if given["scorer"] == "dms":  # slot 1 stores the number of filled slots, so it must not be long-range
        least["window"] = 2
    _check_integers(given, least, source)
    _check_trained(given, source)
    if not isinstance(given["model_type"], str):
        raise ConfigError(f"{source}: model_type must be a string, got {given['model_type']!r}")
    if "decay" in given:
        _check_decay(given["decay"], source)
    if given["scorer"] == "mlstm":
        _check_mlstm(given, source)
    if given["scorer"] in GATE_KINDS:
        _check_gate(given, source)


def _check_decay(decay: object, source: str) -> None:
    if not isinstance(decay, Mapping) or sorted(decay) != ["max", "min", "step"]:
        raise ConfigError(f"{source}: decay must be an object with step, min and max, got {decay!r}")
    if not isinstance(decay["step"], int) or isinstance(decay["step"], bool) or not 1 <= decay["step"] <= _INT32_MAX:
        raise ConfigError(f"{source}: decay.step must be an integer from 1 to {_INT32_MAX}, got {decay['step']!r}")
    if not all(isinstance(decay[k], int | float) for k in ("min", "max")) or not 0 < decay["min"] <= decay["max"] <= 1:
        raise ConfigError(f"{source}: decay needs 0 < min <= max <= 1, got {decay!r}")


def _check_mlstm(given: Mapping, source: str) -> None:
    if given["feature_map"] not in ("hedgehog", "softmax"):
        raise ConfigError(f"{source}: feature_map must be 'hedgehog' or 'softmax', got {given['feature_map']!r}")
    cap = given["gate_softcap"]
    if cap is not None and not _positive(cap):
        raise ConfigError(f"{source}: gate_softcap must be null or a positive float32 number, got {cap!r}")
    _check_flags(given, ("norm", "skip", "delayed"), source)


def _check_gate(given: Mapping, source: str) -> None:
    kind = given["scorer"]
    if given["reads"] not in _READS[kind]:
        raise ConfigError(f"{source}: reads must be one of {', '.join(_READS[kind])}, got {given['reads']!r}")
    _check_flags(given, [key for key in ("gated", "shifted") if key in _KEYS[kind]], source)
    if kind == "dms" and not _positive(given["scale"]):
        raise ConfigError(f"{source}: scale must be a positive float32 number, got {given['scale']!r}")


def _check_flags(given: Mapping, keys: Iterable[str], source: str) -> None:
    for key in keys:
        if not isinstance(given[key], bool):
            raise ConfigError(f"{source}: {key} must be true or false, got {given[key]!r}")


def _check_integers(given: Mapping, least: Mapping[str, int], source: str) -> None:
    for key, low in least.items():
        if not isinstance(given[key], int) or isinstance(given[key], bool) or not low <= given[key] <= MAX_BUDGET:
            raise ConfigError(f"{source}: {key} must be an integer from {low} to {MAX_BUDGET}, got {given[key]!r}")


def _check_trained(given: Mapping, source: str) -> None:
    budgets = given.get("trained", [])
    if not isinstance(budgets, list) or not all(
        isinstance(b, Mapping) and set(b) == {"window", "topk"} for b in budgets
    ):
        raise ConfigError(f"{source}: trained must be a list of objects with window and topk, got {budgets!r}")
    for budget in budgets:
        _check_integers(budget, {"window": 1, "topk": 0}, f"{source}: trained")
    if budgets and budgets[0] != {"window": given["window"], "topk": given["topk"]}:
        raise ConfigError(
            f"{source}: trained must begin with window {given['window']} and topk {given['topk']}, got {budgets[0]!r}"
        )


def _positive(number: object) -> bool:
    """Return whether ``number`` is positive, finite and a normal float32, because the kernels use float32."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return torch.finfo(torch.float32).tiny <= number <= torch.finfo(torch.float32).max


def tensor_shapes(config: ScorerConfig) -> dict[str, tuple]:
    """Return name -> shape of one layer's tensors.

    Letters (F, V, M) stand for sizes that the tensors determine.
    """
    h, x = config.num_kv_heads, 2 * config.head_dim
    if config.scorer == "dms":
        return {"bias": (h,)} | ({"weight": (h, config.hidden_size)} if config.reads == "hidden" else {})
    if config.scorer == "trimkv":
        width = config.hidden_size if config.reads == "hidden" else h * x
        if config.gated:
            first = {"gate_proj.weight": ("M", width), "up_proj.weight": ("M", width)}
            return first | {"down_proj.weight": (h, "M"), "bias": (h,)}
        return {"linear1.weight": ("M", width), "linear1.bias": ("M",), "linear2.weight": (h, "M"), "bias": (h,)}
    shapes: dict[str, tuple] = {"decay_logit": (h,)}
    if config.scorer == "linear":
        return shapes | {"weight": (h, x), "bias": (h,)}
    if config.scorer == "mlp":
        return shapes | {"fc1.weight": (h, x, "M"), "fc1.bias": (h, "M"), "fc2.weight": (h, "M"), "fc2.bias": (h,)}
    shapes |= {name: (h, x, "F") for name in ("q_proj", "k_proj")}
    for gate in ("igate", "fgate"):
        shapes |= {f"{gate}.weight": (h, x), f"{gate}.bias": (h,)}
    shapes |= {"v_proj": (h, x, "V"), "out.weight": (h, "V"), "out.bias": (h,)}
    if config.norm:
        shapes["norm.weight"] = (h, "V")
    if config.skip:
        shapes["skip.weight"] = (h, x)
    return shapes


def of_heads(tensors: dict[str, torch.Tensor], heads: slice) -> dict[str, torch.Tensor]:
    """Return one layer's tensors for the KV heads ``heads``; shared tensors are returned whole."""
    return {name: t if name in _SHARED else t[heads] for name, t in tensors.items()}
