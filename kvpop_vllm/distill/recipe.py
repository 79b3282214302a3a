"""Hyperparameters of a training run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpop_vllm.config import ConfigError, TrainedBudget

_OF_MLSTM = "delayed feature_map gate_softcap norm skip features value_size project_values"
_OF_BOUNDARY = "tau samples margin balance lookahead normalise"
_OF_TARGET = "groups exact_targets target_power"
_OF_REGRESSION = "groups lookahead normalise"
_OF_DECAYS = "fit_decay_min fit_decay_max fit_decay_rows"
_OF_SCORERS = (
    "scorer hidden positions boundary listwise lists decay_step decay_min decay_max fit_decays"
    f" {_OF_MLSTM} {_OF_BOUNDARY} {_OF_TARGET} {_OF_DECAYS}"
)
_OF_SPARSE = "sinks window topk shares protect_prompt"
_OF_BASE = "lr_base lr_base_end"
_OF_NEW = "lr_new lr_new_end"
_OF_TRIMKV = "gate_gated gate_bias capacity"
_OF_DMS = "gate_scale gumbel_tau compression borrow_steps"
READS = {"trimkv": ("hidden", "kv"), "dms": ("hidden", "query"), "kvzap": ("hidden",)}
_AT_LEAST_1 = "length longest batch micro_batch steps samples lists decay_step kl_top fit_decay_rows gate_width features value_size hidden compression"
_AT_LEAST_0 = "kl kl_focus ce boundary listwise weight_decay warmup sinks capacity borrow_steps lookahead"
_ABOVE_0 = "lr_new lr_new_end lr_base lr_base_end clip tau gate_scale gumbel_tau target_power"
RANGES = (
    ("at least 1", lambda value: 1 <= value < math.inf, _AT_LEAST_1),
    ("at least 0", lambda value: 0 <= value < math.inf, _AT_LEAST_0),
    ("above 0", lambda value: 0 < value < math.inf, _ABOVE_0),
    ("at least 0 and below 1", lambda value: 0 <= value < 1, "beta1 beta2"),
)
"""Ranges of fields that may also be None: in words, as a function, and the fields."""
FORMER_NAMES = {
    "calibrate": "fit_decays",
    "calibrate_min": "fit_decay_min",
    "calibrate_max": "fit_decay_max",
    "calibration_rows": "fit_decay_rows",
}
"""Former names of fields, which old runs and command lines have, with the present ones."""
PHASES = ("uptrain", "sparsify", "streaming-plus", "trimkv", "dms", "kvzap")


class TrainingError(RuntimeError):
    """Error that stops training; the message gives the step and the last good checkpoint."""


def option(default, text: str):
    """Return a field of a recipe with its default and its line in the command's help."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Recipe:
    """All settings of a run besides model and data.

    The defaults are KVpop's Table 3, except that the base model is frozen.

    Phases: ``uptrain`` trains the base with dense attention and cross-entropy. ``sparsify`` trains scorers
    under the sparse mask, and the base with them if asked. ``streaming-plus`` trains the base under sinks and
    window alone. ``trimkv`` and ``dms`` train the gates of these papers by their loss at the output; the base
    is frozen, or trained too (dms) if asked. ``kvzap`` fits gates to the targets of ``sparsify`` by regression, under
    dense attention.
    """

    phase: str = option("sparsify", ", ".join(PHASES))
    length: int = option(16384, "S, tokens per row")
    pack: bool = option(
        True,
        "fill rows with documents one after another; else a row is one document of at most S tokens, and a loss at the output covers what follows its prompt",
    )
    protect_prompt: bool = option(False, "never evict a document's prompt, as --kv-protect-prompt all; needs --no-pack")
    select: list[str] = option(
        [], "FIELD=VALUE: take records whose field has this value, or one of several; a.b is field b of field a"
    )
    longest: int | None = option(None, "leave documents of more tokens out (default: cut them)")
    positions: int | None = option(
        None,
        "rows begin at random positions and end before this one, so that scorers meet the rotated keys of longer contexts (the same as --length: rows begin at 0)",
    )
    batch: int = option(128, "rows per optimiser step, over all processes")
    micro_batch: int = option(1, "rows of a process in one pass; the others of its share of --batch follow")
    steps: int = option(2000, "optimiser steps")
    seed: int = option(0, "of initialisation, data order and sampled positions")
    train_base: bool = option(
        False, "sparsify, dms: train the base model too (full fine-tune); uptrain and streaming-plus train it anyway"
    )

    scorer: str = option("mlstm", "mlstm, mlp or linear")
    delayed: bool = option(True, "mlstm: read a token when it leaves the window")
    feature_map: str = option("hedgehog", "mlstm: hedgehog or softmax")
    gate_softcap: float | None = option(None, "mlstm: c of c * tanh(a / c) on the gates")
    norm: bool = option(False, "mlstm: headwise RMSNorm of the readout")
    skip: bool = option(False, "mlstm: skip connection from the scored token")
    features: int | None = option(
        None, "mlstm: columns of its q and k projections (default: D / 2 for hedgehog, else D)"
    )
    value_size: int | None = option(None, "mlstm: width of its value projection (default: D)")
    project_values: bool = option(True, "mlstm: project values; else they are used as they are")
    hidden: int | None = option(None, "mlp: its hidden width (default: D)")
    gate_reads: str = option(
        "hidden",
        "hidden (what goes into attention); trimkv: or kv (keys and values of all heads); dms: or query (a channel of each KV head's first query, which the model gives up)",
    )
    gate_gated: bool = option(False, "trimkv: a gated first layer (SwiGLU)")
    gate_linear: bool = option(False, "kvzap: a linear gate, not an MLP of two layers")
    gate_width: int = option(512, "trimkv, kvzap: hidden units of a layer's gate")
    gate_bias: float = option(8.0, "trimkv: initial bias, beta = sigmoid of it")
    gate_scale: float = option(100.0, "dms: factor on what the gate reads")
    sinks: int = option(4, "s, tokens always kept at the start")
    window: list[int] = option([256], "w, protected newest tokens; one, or one for each of --topk")
    topk: list[int] = option(
        [2016], "k, long-range tokens; several take turns row by row, the first is what the scorer's config says"
    )
    shares: list[list[float]] | None = option(
        None,
        "heads share the long-range slots of all heads as measured: folder of 'kvpop calibrate', file of shares, or folder of a scorer that has them; the scorer is written with them (default: equally)",
    )
    decay_step: int = option(1, "n")
    decay_min: float = option(0.999, "smallest decay of a head")
    decay_max: float = option(0.999999, "largest decay of a head")
    fit_decays: bool = option(False, "after the last step, set each head's decay to the one that loses least attention")
    fit_decay_min: float | None = option(None, "smallest decay that --fit-decays may choose (default: decay_min)")
    fit_decay_max: float | None = option(None, "largest decay that --fit-decays may choose (default: decay_max)")
    fit_decay_rows: int = option(6, "training rows that --fit-decays looks at")

    kl: float = option(1.0, "weight of the KL to the teacher's top tokens (base or gates trained)")
    ce: float = option(0.0, "weight of cross-entropy (base or gates trained)")
    kl_top: int = option(256, "teacher logits in the KL")
    kl_focus: float = option(
        0.0,
        "f: a position counts 1 + f p (1 - q) times in the KL, p and q the teacher's and the student's probability of the teacher's best token",
    )
    boundary: float = option(1.0, "weight of the boundary loss")
    listwise: float = option(0.0, "weight of the listwise loss")
    lists: int = option(16, "query positions of the listwise loss per row and layer")
    tau: float = option(1.0, "temperature of the boundary loss")
    samples: int = option(64, "query positions of the boundary loss per row, layer and head")
    margin: bool = option(True, "weight examples by the teacher's margin")
    balance: bool = option(True, "balance keep and drop examples headwise")
    lookahead: int | None = option(None, "L, tokens after the window that a target looks at")
    normalise: bool = option(True, "divide a target by the number of queries that could attend")
    groups: str = option("max", "query heads of a KV head: max or mean")
    exact_targets: bool = option(False, "targets from dense log-normalisers (one more pass)")
    target_power: float = option(
        1.0, "power of the attention that targets add up; with 2 a token that is read sharply once counts more"
    )

    capacity: float = option(1.0, "trimkv: weight of the capacity loss; M is sinks + window + topk")
    compression: float = option(8.0, "dms: tokens per token kept that training ends with; it begins with 1")
    borrow_steps: int = option(0, "dms: optimiser steps over which a borrowed channel leaves its query (0: at once)")
    gumbel_tau: float = option(0.1, "dms: temperature of the relaxed decisions")

    lr_new: float = option(1e-3, "peak learning rate of scorers: warm-up, then cosine")
    lr_new_end: float = option(8e-5, "learning rate of scorers at the last step")
    warmup: int = option(100, "warm-up steps of the scorers' rate")
    lr_base: float = option(8e-5, "peak learning rate of the base model")
    lr_base_end: float | None = option(
        None, "learning rate of the base model at the last step, after --warmup and a cosine (default: constant)"
    )
    beta1: float = option(0.9, "AdamW")
    beta2: float = option(0.95, "AdamW")
    weight_decay: float = option(1e-4, "AdamW")
    clip: float = option(1.0, "largest gradient norm")
    dtype: str = option("bfloat16", "bfloat16 or float32; ranking is float32 or better always")
    activation_checkpointing: bool = option(True, "recompute the layers in backward")

    def __post_init__(self):
        def refuse(problem: str):
            raise ConfigError(f"recipe: {problem}")

        if self.phase not in PHASES:
            refuse(f"phase must be one of {', '.join(PHASES)}, got {self.phase!r}")
        if self.dtype not in ("bfloat16", "float32"):
            refuse(f"dtype must be bfloat16 or float32, got {self.dtype!r}")
        if self.groups not in ("max", "mean"):
            refuse(f"groups must be max or mean, got {self.groups!r}")
        if self.gate_reads not in (readable := READS.get(self.phase, ("hidden",))):
            refuse(f"gate_reads must be {' or '.join(readable)} in phase {self.phase}, got {self.gate_reads!r}")
        if self.gate_reads == "query" and not self.train_base:
            refuse("a frozen model's queries say nothing of evictions: with --gate-reads query give --train-base")
        if self.borrow_steps > self.steps:
            refuse(
                f"borrow_steps {self.borrow_steps} exceeds steps {self.steps}: the channel must be out of the query at the end"
            )
        for rule, allows, names in RANGES:
            for name in names.split():
                if (value := getattr(self, name)) is not None and not allows(value):
                    refuse(f"{name} must be {rule}, got {value}")
        if self.micro_batch > 1 and self.trains_gates:
            refuse(f"phase {self.phase} takes one row a pass: leave --micro-batch out")
        if self.micro_batch > 1 and (not self.pack or len(self.trained) > 1 or self.moves_rows):
            refuse(
                "rows of a pass have one budget and begin at 0: with --micro-batch give --pack, one --topk, no --positions"
            )
        if not 0 <= self.seed < 2**31:
            refuse(f"seed must be from 0 to {2**31 - 1}, got {self.seed}")
        if self.positions is not None and self.positions < self.length:
            refuse(f"length {self.length} exceeds positions {self.positions}: raise --positions to at least the length")
        if self.protect_prompt and self.pack:
            refuse("packed rows have no prompts to protect: with --protect-prompt give --no-pack")
        if not self.topk or min(self.topk) < 1:
            refuse(f"topk must be at least 1, got {self.topk}")
        if not self.window or min(self.window) < 1:
            refuse(f"window must be at least 1, got {self.window}")
        if len(self.window) not in (1, len(self.topk)):
            refuse(
                f"window needs one value, or one for each of the {len(self.topk)} of topk, got {self.window}: give --window"
            )
        window, topk = max(self.trained, key=sum)
        if self.phase != "uptrain" and self.length < self.shortest_row:
            sums, lower = f"window + topk = {self.sinks} + {window} + {topk}", "--topk"
            if self.serves_budget_alone:
                sums, lower = f"window = {self.sinks} + {max(self.window)}", "--window"
            refuse(f"length {self.length} must exceed sinks + {sums}: raise --length or lower {lower}")
        low, high = self.fitted_range
        if self.has_fitted_decays and not 0 < low < high < 1:
            refuse(f"fit_decays needs 0 < min < max < 1, got {low} and {high}")
        if not math.isfinite(self.gate_bias):
            refuse(f"gate_bias must be a number, got {self.gate_bias}")
        if self.trains_gates_alone and self.train_base:
            refuse(f"phase {self.phase} trains gates alone: give --no-train-base")
        if self.phase != "uptrain" and self.distils and not (self.kl > 0 or self.ce > 0):
            trained = "the base model is" if self.trains_base else "gates are"
            refuse(f"{trained} trained but neither --kl nor --ce is above 0: give one")
        if self.phase == "sparsify" and not self.trains_base and not (self.boundary or self.listwise):
            refuse(
                "with --boundary 0 and the base model frozen nothing learns: give --boundary, --listwise or --train-base"
            )

    @property
    def trains_base(self) -> bool:
        """True if the base model is trained: if asked, and in the phases that train nothing else."""
        return self.train_base or self.phase in ("uptrain", "streaming-plus")

    @property
    def trains_gates(self) -> bool:
        """True if gates are trained."""
        return self.phase in READS

    @property
    def trains_gates_alone(self) -> bool:
        """True if gates are trained, and the base model cannot be."""
        return self.phase in ("trimkv", "kvzap")

    @property
    def regresses(self) -> bool:
        """True if gates are fitted to targets; other gates are trained by the loss that their evictions cause."""
        return self.phase == "kvzap"

    @property
    def attends_densely(self) -> bool:
        """True if rows are trained on without any eviction, not even a soft one."""
        return self.phase == "uptrain" or self.regresses

    @property
    def has_scorers(self) -> bool:
        """True if scorers or gates are trained, and written at the end."""
        return self.phase == "sparsify" or self.trains_gates

    @property
    def distils(self) -> bool:
        """True if the loss depends on the model's outputs, so that gradients pass through the model."""
        return self.trains_base or (self.trains_gates and not self.regresses)

    @property
    def has_teacher(self) -> bool:
        """True if the loss has a KL to the untrained model."""
        return self.distils and self.phase != "uptrain" and self.kl > 0

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
    def shortest_row(self) -> int:
        """Minimum tokens of a row, after a protected prompt, from which something is evicted."""
        if self.phase == "uptrain":
            return 2
        return self.sinks + (max(self.window) if self.serves_budget_alone else max(map(sum, self.trained))) + 1

    @property
    def serves_budget_alone(self) -> bool:
        """True if no token is evicted for a budget in training, only in serving."""
        return self.phase in ("dms", "kvzap")

    @property
    def has_fitted_decays(self) -> bool:
        """True if decays are set after training; phases without scorers have no decays."""
        return self.fit_decays and self.phase == "sparsify"

    @property
    def fitted_range(self) -> tuple[float, float]:
        """Smallest and largest decay that ``fit_decays`` may choose."""
        low = self.decay_min if self.fit_decay_min is None else self.fit_decay_min
        high = self.decay_max if self.fit_decay_max is None else self.fit_decay_max
        return low, high

    def scorer_options(self) -> dict:
        """Return the fields of a :class:`~kvpop_vllm.scorers.ScorerConfig` apart from the model's shape."""
        window, topk = self.trained[0]
        kind = self.phase if self.trains_gates else self.scorer
        options = {"scorer": kind, "sinks": self.sinks, "window": window, "topk": topk}
        if len(self.trained) > 1:
            options["trained"] = tuple(TrainedBudget(*budget) for budget in self.trained)
        if self.phase == "trimkv":
            return options | {"reads": self.gate_reads, "gated": self.gate_gated}
        if self.phase == "dms":
            return options | {"reads": self.gate_reads, "scale": self.gate_scale}
        if self.phase == "kvzap":
            return options | {"reads": self.gate_reads, "linear": self.gate_linear}
        options["shares"] = self.shares or []
        options["decay"] = {"step": self.decay_step, "min": self.decay_min, "max": self.decay_max}
        if self.scorer == "mlstm":
            names = ("delayed", "feature_map", "gate_softcap", "norm", "skip")
            options |= {name: getattr(self, name) for name in names}
        return options

    def scorer_sizes(self) -> dict:
        """Return the sizes of the scorer's tensors, as :func:`kvpop_vllm.scorers.build` takes them."""
        if self.phase == "kvzap":  # the mean target of uniform attention
            return {"bias": -math.log(self.length)} | ({} if self.gate_linear else {"width": self.gate_width})
        if self.trains_gates:
            return {"width": self.gate_width, "bias": self.gate_bias} if self.phase == "trimkv" else {}
        names = {"mlstm": ("features", "value_size", "project_values"), "mlp": ("hidden",)}.get(self.scorer, ())
        return {name: getattr(self, name) for name in names}

    def without_effect(self, fields: Iterable[str]) -> tuple[str, str] | None:
        """Return the first of ``fields`` that has no effect in this recipe and why, or None."""
        base, scorers, phase = self.trains_base, self.phase == "sparsify", self.phase
        in_effect = _OF_REGRESSION.split() if self.regresses else ()
        reasons = (
            (
                not self.trains_gates_alone,
                f"is about training the base model, and phase {phase} trains gates alone",
                _OF_BASE,
            ),
            (base, "is about training the base model, which is frozen", _OF_BASE),
            (
                not self.regresses,
                f"is about the model's outputs, and phase {phase} fits gates to targets",
                "kl ce activation_checkpointing",
            ),
            (self.distils, "is about training the base model, which is frozen", "kl ce"),
            (self.trains_gates, f"is about gates, and phase {phase} has none", "gate_reads"),
            (self.gate_reads == "query", "is about a borrowed channel: give --gate-reads query", "borrow_steps"),
            (phase == "trimkv", f"is about TRIM-KV's gates, and phase {phase} has none", _OF_TRIMKV),
            (phase == "kvzap", f"is about KVzap's gates, and phase {phase} has none", "gate_linear"),
            (
                self.trains_gates_alone and not self.gate_linear,
                "is about MLPs of TRIM-KV's and KVzap's gates, and there is none",
                "gate_width",
            ),
            (phase == "dms", f"is about DMS's gates, and phase {phase} has none", _OF_DMS),
            (self.has_scorers, f"is about scorers, and phase {phase} has none", _OF_NEW),
            (self.has_scorers or self.lr_base_end, "is about rates that fall: give --lr-base-end", "warmup"),
            (self.phase != "uptrain", "is about sparse attention, and phase uptrain is dense", _OF_SPARSE),
            (self.phase != "uptrain", "is a weight beside others, and phase uptrain has cross-entropy alone", "kl ce"),
            (scorers, f"is about scorers, and phase {self.phase} has none", _OF_SCORERS),
            (
                not self.trains_gates,
                f"is about heads that rank tokens apart, and gates of phase {phase} have no shares",
                "shares",
            ),
            (self.scorer == "mlstm", f"is about mlstm scorers, not {self.scorer}", _OF_MLSTM),
            (self.scorer == "mlp", f"is about mlp scorers, not {self.scorer}", "hidden"),
            (self.project_values, "is about the value projection, and there is none", "value_size"),
            (self.has_fitted_decays, "is about fitted decays: give --fit-decays", _OF_DECAYS),
            (self.boundary > 0, "is about the boundary loss, which has weight 0", _OF_BOUNDARY),
            (self.listwise > 0, "is about the listwise loss, which has weight 0", "lists"),
            (
                self.boundary or self.listwise,
                "is about targets, and both losses that have them have weight 0",
                _OF_TARGET,
            ),
            (self.has_teacher, "is about the KL to a teacher, and there is none", "kl_top kl_focus"),
        )
        for applies, why, names in reasons:
            without = (name for name in fields if name in names.split() and name not in in_effect)
            if not applies and (unused := next(without, None)):
                return unused, why
        return None

    @staticmethod
    def defaults() -> dict:
        """Return all fields with their defaults."""
        return dataclasses.asdict(Recipe())

    def to_json(self) -> dict:
        """Return all fields, ``train_base`` with the value that takes effect."""
        return dataclasses.asdict(self) | {"train_base": self.trains_base}
