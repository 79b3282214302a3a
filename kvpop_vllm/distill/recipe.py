"""Hyperparameters of a training run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpop_vllm.config import ConfigError, TrainedBudget

_OF_MLSTM = "delayed feature_map gate_softcap norm skip features value_size project_values"
_OF_BOUNDARY = "tau samples margin balance lookahead normalise groups exact_targets"
_OF_CALIBRATION = "calibrate_min calibrate_max calibration_rows"
_OF_SCORERS = f"scorer hidden positions boundary decay_step decay_min decay_max calibrate {_OF_MLSTM} {_OF_BOUNDARY} {_OF_CALIBRATION}"
_OF_NEW = "lr_new lr_new_end warmup"
_OF_TRIMKV = "gate_gated gate_width gate_bias capacity"
_OF_DMS = "gate_scale gumbel_tau compression borrow_steps"
READS = {"trimkv": ("hidden", "kv"), "dms": ("hidden", "query")}
PHASES = ("uptrain", "sparsify", "streaming-plus", "trimkv", "dms")


class TrainingError(RuntimeError):
    """Error that stops training; the message gives the step and the last good checkpoint."""


class NotFinite(ArithmeticError):
    """Error for scores that are infinite or NaN."""


@dataclass(frozen=True)
class BoundaryOptions:
    """Options of the boundary loss and of its targets.

    See :func:`kvpop_vllm.kernels.ops.boundary_loss` and :func:`~kvpop_vllm.distill.targets.retention_target`.
    """

    tau: float = 1.0
    samples: int = 64
    margin: tuple[float, float] | None = (0.1, 1.0)
    balance: tuple[float, float] | None = (0.2, 5.0)
    lookahead: int | None = None
    normalise: bool = True
    groups: str = "max"
    exact: bool = False
    """True for targets from dense log-normalisers instead of the sparse pass's own.

    This costs one more attention pass.
    """


@dataclass(frozen=True)
class Recipe:
    """All settings of a run besides model and data.

    The defaults are KVpop's Table 3, except that the base model is trained only if asked.

    Phases: ``uptrain`` trains the base with dense attention and cross-entropy. ``sparsify`` trains scorers
    under the sparse mask, and the base with them if asked. ``streaming-plus`` trains the base under sinks and
    window alone. ``trimkv`` and ``dms`` train the gates of these papers by their loss at the output; the base
    is frozen, or trained too (dms) if asked.
    """

    phase: str = field(default="sparsify", metadata={"help": ", ".join(PHASES)})
    length: int = field(default=16384, metadata={"help": "S, tokens per packed row"})
    positions: int | None = field(
        default=None,
        metadata={
            "help": "rows begin at random positions and end before this one, so that scorers meet the rotated keys of longer"
            " contexts (the same as --length: rows begin at 0)"
        },
    )
    batch: int = field(default=128, metadata={"help": "rows per optimiser step, over all processes"})
    steps: int = field(default=2000, metadata={"help": "optimiser steps"})
    seed: int = field(default=0, metadata={"help": "of initialisation, data order and sampled positions"})
    train_base: bool = field(
        default=False,
        metadata={
            "help": "sparsify, dms: train the base model too (full fine-tune); uptrain and streaming-plus train it anyway"
        },
    )

    scorer: str = field(default="mlstm", metadata={"help": "mlstm, mlp or linear"})
    delayed: bool = field(default=True, metadata={"help": "mlstm: read a token when it leaves the window"})
    feature_map: str = field(default="hedgehog", metadata={"help": "mlstm: hedgehog or softmax"})
    gate_softcap: float | None = field(default=None, metadata={"help": "mlstm: c of c * tanh(a / c) on the gates"})
    norm: bool = field(default=False, metadata={"help": "mlstm: headwise RMSNorm of the readout"})
    skip: bool = field(default=False, metadata={"help": "mlstm: skip connection from the scored token"})
    features: int | None = field(
        default=None,
        metadata={"help": "mlstm: columns of its q and k projections (default: D / 2 for hedgehog, else D)"},
    )
    value_size: int | None = field(default=None, metadata={"help": "mlstm: width of its value projection (default: D)"})
    project_values: bool = field(
        default=True, metadata={"help": "mlstm: project values; else they are used as they are"}
    )
    hidden: int | None = field(default=None, metadata={"help": "mlp: its hidden width (default: D)"})
    gate_reads: str = field(
        default="hidden",
        metadata={
            "help": "hidden (what goes into attention); trimkv: or kv (keys and values of all heads); dms: or query (a channel of each KV"
            " head's first query, which the model gives up)"
        },
    )
    gate_gated: bool = field(default=False, metadata={"help": "trimkv: a gated first layer (SwiGLU)"})
    gate_width: int = field(default=512, metadata={"help": "trimkv: hidden units of a layer's gate"})
    gate_bias: float = field(default=8.0, metadata={"help": "trimkv: initial bias, beta = sigmoid of it"})
    gate_scale: float = field(default=100.0, metadata={"help": "dms: factor on what the gate reads"})
    sinks: int = field(default=4, metadata={"help": "s, tokens always kept at the start"})
    window: list[int] = field(
        default_factory=lambda: [256],
        metadata={"help": "w, protected newest tokens; one, or one for each of --topk"},
    )
    topk: list[int] = field(
        default_factory=lambda: [2016],
        metadata={
            "help": "k, long-range tokens; several take turns row by row, the first is what the scorer's config says"
        },
    )
    decay_step: int = field(default=1, metadata={"help": "n"})
    decay_min: float = field(default=0.999, metadata={"help": "smallest decay of a head"})
    decay_max: float = field(default=0.999999, metadata={"help": "largest decay of a head"})
    calibrate: bool = field(
        default=False,
        metadata={"help": "after the last step, set each head's decay to the one that loses least attention"},
    )
    calibrate_min: float | None = field(
        default=None, metadata={"help": "smallest decay that --calibrate may choose (default: decay_min)"}
    )
    calibrate_max: float | None = field(
        default=None, metadata={"help": "largest decay that --calibrate may choose (default: decay_max)"}
    )
    calibration_rows: int = field(default=6, metadata={"help": "training rows that --calibrate looks at"})

    kl: float = field(
        default=1.0, metadata={"help": "weight of the KL to the teacher's top tokens (base or gates trained)"}
    )
    ce: float = field(default=0.0, metadata={"help": "weight of cross-entropy (base or gates trained)"})
    kl_top: int = field(default=256, metadata={"help": "teacher logits in the KL"})
    boundary: float = field(default=1.0, metadata={"help": "weight of the boundary loss"})
    tau: float = field(default=1.0, metadata={"help": "temperature of the boundary loss"})
    samples: int = field(default=64, metadata={"help": "query positions of the boundary loss per row, layer and head"})
    margin: bool = field(default=True, metadata={"help": "weight examples by the teacher's margin"})
    balance: bool = field(default=True, metadata={"help": "balance keep and drop examples headwise"})
    lookahead: int | None = field(default=None, metadata={"help": "L, tokens after the window that a target looks at"})
    normalise: bool = field(
        default=True, metadata={"help": "divide a target by the number of queries that could attend"}
    )
    groups: str = field(default="max", metadata={"help": "query heads of a KV head: max or mean"})
    exact_targets: bool = field(default=False, metadata={"help": "targets from dense log-normalisers (one more pass)"})

    capacity: float = field(
        default=1.0, metadata={"help": "trimkv: weight of the capacity loss; M is sinks + window + topk"}
    )
    compression: float = field(
        default=8.0, metadata={"help": "dms: tokens per token kept that training ends with; it begins with 1"}
    )
    borrow_steps: int = field(
        default=0, metadata={"help": "dms: optimiser steps over which a borrowed channel leaves its query (0: at once)"}
    )
    gumbel_tau: float = field(default=0.1, metadata={"help": "dms: temperature of the relaxed decisions"})

    lr_new: float = field(default=1e-3, metadata={"help": "peak learning rate of scorers: warm-up, then cosine"})
    lr_new_end: float = field(default=8e-5, metadata={"help": "learning rate of scorers at the last step"})
    warmup: int = field(default=100, metadata={"help": "warm-up steps of the scorers' rate"})
    lr_base: float = field(default=8e-5, metadata={"help": "learning rate of the base model, constant"})
    beta1: float = field(default=0.9, metadata={"help": "AdamW"})
    beta2: float = field(default=0.95, metadata={"help": "AdamW"})
    weight_decay: float = field(default=1e-4, metadata={"help": "AdamW"})
    clip: float = field(default=1.0, metadata={"help": "largest gradient norm"})
    dtype: str = field(
        default="bfloat16", metadata={"help": "bfloat16 or float32; ranking is float32 or better always"}
    )
    activation_checkpointing: bool = field(default=True, metadata={"help": "recompute the layers in backward"})

    def __post_init__(self):
        def refuse(problem: str):
            raise ConfigError(f"recipe: {problem}")

        if self.phase not in PHASES:
            refuse(f"phase must be one of {', '.join(PHASES)}, got {self.phase!r}")
        if self.dtype not in ("bfloat16", "float32"):
            refuse(f"dtype must be bfloat16 or float32, got {self.dtype!r}")
        if self.groups not in ("max", "mean"):
            refuse(f"groups must be max or mean, got {self.groups!r}")
        if self.gate_reads not in (known := READS.get(self.phase, ("hidden",))):
            refuse(f"gate_reads must be {' or '.join(known)} in phase {self.phase}, got {self.gate_reads!r}")
        if self.gate_reads == "query" and not self.train_base:
            refuse("a frozen model's queries say nothing of evictions: with --gate-reads query give --train-base")
        if self.borrow_steps > self.steps:
            refuse(
                f"borrow_steps {self.borrow_steps} exceeds steps {self.steps}: the channel must be out of the query at the end"
            )
        for name in ("length", "batch", "steps", "samples", "decay_step", "kl_top", "calibration_rows", "gate_width"):
            if getattr(self, name) < 1:
                refuse(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr_new", "lr_new_end", "lr_base", "clip", "tau", "gate_scale", "gumbel_tau"):
            if not 0 < getattr(self, name) < math.inf:
                refuse(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("kl", "ce", "boundary", "weight_decay", "warmup", "sinks", "capacity", "borrow_steps"):
            if not 0 <= getattr(self, name) < math.inf:
                refuse(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                refuse(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**31:
            refuse(f"seed must be from 0 to {2**31 - 1}, got {self.seed}")
        if self.positions is not None and self.positions < self.length:
            refuse(f"length {self.length} exceeds positions {self.positions}: raise --positions to at least the length")
        for name in ("features", "value_size", "hidden"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                refuse(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lookahead is not None and self.lookahead < 0:
            refuse(f"lookahead must be at least 0, got {self.lookahead}")
        if not self.topk or min(self.topk) < 1:
            refuse(f"topk must be at least 1, got {self.topk}")
        if not self.window or min(self.window) < 1:
            refuse(f"window must be at least 1, got {self.window}")
        if len(self.window) not in (1, len(self.topk)):
            refuse(
                f"window needs one value, or one for each of the {len(self.topk)} of topk, got {self.window}: give --window"
            )
        window, topk = max(self.trained, key=sum)
        if self.phase != "uptrain" and self.length <= self.sinks + window + topk:
            refuse(
                f"length {self.length} must exceed sinks + window + topk = {self.sinks} + {window} + {topk}:"
                " raise --length or lower --topk"
            )
        low, high = self.calibrated_range
        if self.calibrates and not 0 < low < high < 1:
            refuse(f"calibrate needs 0 < min < max < 1, got {low} and {high}")
        if not math.isfinite(self.gate_bias):
            refuse(f"gate_bias must be a number, got {self.gate_bias}")
        if not 1 <= self.compression < math.inf:
            refuse(f"compression must be at least 1, got {self.compression}")
        if self.phase == "trimkv" and self.train_base:
            refuse("phase trimkv trains gates alone: leave --train-base out")
        if self.phase != "uptrain" and self.distils and not (self.kl > 0 or self.ce > 0):
            trained = "the base model is" if self.trains_base else "gates are"
            refuse(f"{trained} trained but neither --kl nor --ce is above 0: give one")
        if self.phase == "sparsify" and not self.trains_base and self.boundary == 0:
            refuse("with --boundary 0 and the base model frozen nothing learns: give --boundary, or --train-base")

    @property
    def trains_base(self) -> bool:
        """True if the base model is trained: if asked, and in the phases that train nothing else."""
        return self.train_base or self.phase in ("uptrain", "streaming-plus")

    @property
    def trains_gates(self) -> bool:
        """True if gates are trained, by the loss that their evictions cause."""
        return self.phase in READS

    @property
    def has_scorers(self) -> bool:
        """True if scorers or gates are trained, and written at the end."""
        return self.phase == "sparsify" or self.trains_gates

    @property
    def distils(self) -> bool:
        """True if the loss depends on the model's outputs, so that gradients pass through the model."""
        return self.trains_base or self.trains_gates

    @property
    def moves_rows(self) -> bool:
        """True if rows begin at random positions."""
        return self.positions is not None and self.positions > self.length and self.phase == "sparsify"

    @property
    def trained(self) -> list[tuple[int, int]]:
        """Window and k of the rows; rows take them in turn."""
        windows = self.window * len(self.topk) if len(self.window) == 1 else self.window
        return list(zip(windows, self.topk, strict=True))

    @property
    def calibrates(self) -> bool:
        """True if decays are set by calibration; phases without scorers have no decays."""
        return self.calibrate and self.phase == "sparsify"

    @property
    def calibrated_range(self) -> tuple[float, float]:
        """Smallest and largest decay that calibration may choose."""
        low = self.decay_min if self.calibrate_min is None else self.calibrate_min
        high = self.decay_max if self.calibrate_max is None else self.calibrate_max
        return low, high

    @property
    def boundary_options(self) -> BoundaryOptions:
        """Options of the boundary loss; the clips and the margin's floor are ours, the paper gives none."""
        return BoundaryOptions(
            tau=self.tau,
            samples=self.samples,
            margin=BoundaryOptions.margin if self.margin else None,
            balance=BoundaryOptions.balance if self.balance else None,
            lookahead=self.lookahead,
            normalise=self.normalise,
            groups=self.groups,
            exact=self.exact_targets,
        )

    def scorer_options(self) -> dict:
        """Return the fields of a :class:`~kvpop_vllm.scorers.ScorerConfig` beside the model's shape."""
        window, topk = self.trained[0]
        kind = self.phase if self.trains_gates else self.scorer
        options = {"scorer": kind, "sinks": self.sinks, "window": window, "topk": topk}
        if len(self.trained) > 1:
            options["trained"] = tuple(TrainedBudget(*budget) for budget in self.trained)
        if self.phase == "trimkv":
            return options | {"reads": self.gate_reads, "gated": self.gate_gated}
        if self.phase == "dms":
            return options | {"reads": self.gate_reads, "scale": self.gate_scale}
        options["decay"] = {"step": self.decay_step, "min": self.decay_min, "max": self.decay_max}
        if self.scorer == "mlstm":
            names = ("delayed", "feature_map", "gate_softcap", "norm", "skip")
            options |= {name: getattr(self, name) for name in names}
        return options

    def scorer_sizes(self) -> dict:
        """Return the sizes of the scorer's tensors, as :func:`kvpop_vllm.scorers.build` takes them."""
        if self.trains_gates:
            return {"width": self.gate_width, "bias": self.gate_bias} if self.phase == "trimkv" else {}
        names = {"mlstm": ("features", "value_size", "project_values"), "mlp": ("hidden",)}.get(self.scorer, ())
        return {name: getattr(self, name) for name in names}

    def without_effect(self, given: Iterable[str]) -> tuple[str, str] | None:
        """Return the first of the fields ``given`` that has no effect in this recipe and why, or None."""
        base, scorers, phase = self.trains_base, self.phase == "sparsify", self.phase
        kl = self.distils and phase != "uptrain" and self.kl > 0
        reasons = (
            (phase != "trimkv", "is about training the base model, and phase trimkv trains gates alone", "lr_base"),
            (base, "is about training the base model, which is frozen", "lr_base"),
            (self.distils, "is about training the base model, which is frozen", "kl ce"),
            (self.trains_gates, f"is about gates, and phase {phase} has none", "gate_reads"),
            (self.gate_reads == "query", "is about a borrowed channel: give --gate-reads query", "borrow_steps"),
            (phase == "trimkv", f"is about TRIM-KV's gates, and phase {phase} has none", _OF_TRIMKV),
            (phase == "dms", f"is about DMS's gates, and phase {phase} has none", _OF_DMS),
            (self.has_scorers, f"is about scorers, and phase {phase} has none", _OF_NEW),
            (self.phase != "uptrain", "is about sparse attention, and phase uptrain is dense", "sinks window topk"),
            (self.phase != "uptrain", "is a weight beside others, and phase uptrain has cross-entropy alone", "kl ce"),
            (scorers, f"is about scorers, and phase {self.phase} has none", _OF_SCORERS),
            (self.scorer == "mlstm", f"is about mlstm scorers, not {self.scorer}", _OF_MLSTM),
            (self.scorer == "mlp", f"is about mlp scorers, not {self.scorer}", "hidden"),
            (self.project_values, "is about the value projection, and there is none", "value_size"),
            (self.calibrates, "is about calibration: give --calibrate", _OF_CALIBRATION),
            (self.boundary > 0, "is about the boundary loss, which has weight 0", _OF_BOUNDARY),
            (kl, "is about the KL to a teacher, and there is none", "kl_top"),
        )
        for applies, why, names in reasons:
            if not applies and (found := next((name for name in given if name in names.split()), None)):
                return found, why
        return None

    @staticmethod
    def defaults() -> dict:
        """Return the fields that have a plain default, with that default."""
        return {f.name: f.default for f in dataclasses.fields(Recipe) if f.default is not dataclasses.MISSING}

    def to_json(self) -> dict:
        """Return all fields, ``train_base`` with the value that takes effect."""
        return dataclasses.asdict(self) | {"train_base": self.trains_base}
