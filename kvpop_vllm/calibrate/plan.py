"""Settings of a calibration, what follows from them, and the work that it takes."""

import hashlib
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from kvpop_vllm import policies
from kvpop_vllm.cache.ranks import Shard, layers_of_stages, shards_of
from kvpop_vllm.calibrate.rows import TEXT, Text, read_text
from kvpop_vllm.calibration.shares import takes_shares
from kvpop_vllm.config import DEFAULT_SINKS, ConfigError, PolicySettings, resolve_retention
from kvpop_vllm.distill.run import default_device, load_tokenizer
from kvpop_vllm.distill.sources import find_sources
from kvpop_vllm.evaluation.output import note
from kvpop_vllm.evaluation.policies import PolicySpec, learned
from kvpop_vllm.model_shape import ModelShape, positions_of, read_model_config, vocabulary_of
from kvpop_vllm.policies.base import GATED
from kvpop_vllm.rope import check_rope
from kvpop_vllm.scorers.checkpoint import files_of, is_published_scorer
from kvpop_vllm.supported import CHUNKED, FULL, SLIDING

VERSION = 6
"""Version of what is measured."""
LENGTH, SHORTEST = 2048, 64
"""Default length and shortest length of a row, in tokens."""
SIZES = 64, 16, 8, 4, 2
"""Windows, or long-range slots, at which layers and heads are measured: the tokens after a prompt over these."""
QUERIES = 32
"""The length over this is the number of queries that run again, unless prompts are protected."""
BUDGETS = 2, 4, 8
"""Default budgets of the report: the tokens after a prompt over these."""
FACTORS = 2.0, 2.0**0.5, 2.0**0.25, 2.0**0.125
"""Changes of slots in a round of improvement, tried one after the other."""
ROUNDS = 8
"""Default of the most rounds in which a scorer's table of shares is improved, by large steps and by smaller ones."""
GROUPS = 16
"""Groups of layers and heads that a round changes one after the other. In models with more of them several change together."""
WINDOWS = 1 / 16, 1 / 4, 1 / 2
"""Windows that are tried for a policy, as fractions of ``B - s``."""
SEARCHED = 3
"""Rows that tables and windows are chosen by, on the kernels of serving; with a scorer all rows."""
STRIDE = 4
"""Every so many predictions of a row are compared under a policy."""
PROBE = "streaming-llm"
"""Policy that is in every report, and decides about shares where no other does: a window, and the cheapest."""
SHORTLIST = 3
"""Tables of shares that are tried on the kernels of serving; under a policy other than :data:`PROBE` those that are improved."""
SERVED = 0.9
"""Time of a pass under a policy, over that of a dense pass, as progress counts it."""
FURTHER = "triattention"
"""Policy that is in a report besides :data:`PROBE` by default, and then decides: it reads prompts in chunks too."""
AGAIN = 1.7
"""Time of a query that runs again, over that of a token of a dense pass: it attends to the whole row."""


@dataclass(frozen=True)
class Options:
    """Options of a calibration.

    Attributes:
        model: folder of the model.
        out: folder to write.
        data: files and folders of text, empty for the text of this package.
        unit: ``layer`` or ``head``.
        policy: name of the policy that decides about shares. None stands for the scorer's, else :data:`FURTHER` if it
            is in the report, else :data:`PROBE`.
        policies: names of further policies of the report, None for those of :func:`further_policies`.
        scorer: folder of the scorer of the policy that decides, into which shares are written, or None.
        budgets: budgets of the report, in tokens, descending, empty for :data:`BUDGETS`.
        length: S, tokens of a row, None for :data:`LENGTH`, or the model's positions if it has fewer.
        rows: rows to measure on, and as many to judge by.
        rounds: most rounds in which a table of shares is improved, None for :data:`ROUNDS` with a scorer, else 0.
        protect: True to protect the prompts of documents.
        dtype: dtype of the model.
        ranks: tensor-parallel ranks that will serve the model.
        stages: pipeline stages that will serve the model.
    """

    model: str
    out: str
    data: tuple[str, ...] = ()
    unit: str = "layer"
    policy: str | None = None
    policies: tuple[str, ...] | None = None
    scorer: str | None = None
    budgets: tuple[int, ...] = ()
    length: int | None = None
    rows: int = 10
    rounds: int | None = None
    protect: bool = False
    dtype: str = "float32"
    ranks: int = 1
    stages: int = 1


def further_policies(options: Options) -> tuple[str, ...]:
    """Return the names of further policies of a report: by default :data:`FURTHER`, on a CPU and under :data:`PROBE`."""
    if options.policies is not None:
        return options.policies
    # next to a GPU its attention would run on the host, which takes long
    return () if options.policy or options.scorer or default_device().type != "cpu" else (FURTHER,)


def specs_of(options: Options) -> dict[str, PolicySpec]:
    """Return the policies of a report by name, first the one that decides."""
    specs, further = [] if options.scorer is None else [_of_scorer(options)], further_policies(options)
    named = [("--policy", options.policy)] if options.policy and not specs else []
    named += [("--policies", name) for name in further]
    for flag, name in named:
        cls = policies.get(name)
        if specs and name == specs[0].policy:
            raise ConfigError(f"{flag} {name} is the policy of --scorer, and in the report already: leave it out")
        if cls.scorer_kind or cls.keeps_all or cls.compresses:
            end = "needs a scorer: give --scorer DIR" if cls.scorer_kind else "takes no shares of layers: leave it out"
            raise ConfigError(f"{flag} {name} {end}")
    deciding = options.policy or (FURTHER if FURTHER in further else PROBE)
    names = [*([] if specs else [deciding]), PROBE, *further]
    specs += [PolicySpec(name, name).measured(options.out) for name in dict.fromkeys(names)]
    return {spec.policy: spec for spec in specs}


def _of_scorer(options: Options) -> PolicySpec:
    """Return the policy of the scorer, of which ``--policy`` may be the name."""
    spec = learned(options.scorer, options.model)[0]
    if options.policy not in (None, spec.policy):
        raise ConfigError(
            f"--policy {options.policy} has no use for --scorer {options.scorer}, which is for {spec.policy}: give --policy {spec.policy},"
            " or leave --scorer out"
        )
    if policies.get(spec.policy).signals & GATED:
        raise ConfigError(f"--scorer {options.scorer} holds a gate, and shares are for scorers of keys and values")
    if not Path(options.scorer).is_dir() or is_published_scorer(options.scorer):
        raise ConfigError(
            f"--scorer {options.scorer} cannot take shares, which are written into a scorer's folder: write one with 'kvpop import'"
        )
    return spec


class Plan:
    """Sizes, budgets, policies and rows of a calibration.

    Args:
        options: see :class:`Options`.

    Attributes:
        specs: policies of the report by name, first the one that decides.
        length: S.
        shape: the model as policies see it.
        budgets: budgets of the report, in tokens.
        text: rows of tokens.
        prompt: tokens of the longest protected prompt of a row.
        split: number of layers whose heads are measured.
        shards: layers and heads that divide slots among them: those of each rank that will serve the model.
    """

    def __init__(self, options: Options):
        self.options, self.specs = options, specs_of(options)
        positions = positions_of(read_model_config(options.model))
        self.length = length = options.length or min(LENGTH, positions or LENGTH)
        if positions and length > positions:
            raise ConfigError(f"--length {length} is more than the model's {positions} positions: lower it")
        if length < SHORTEST:
            raise ConfigError(f"--length {length} is too short to shrink: give at least {SHORTEST}")
        self.shape, self.dtype = ModelShape.in_context(options.model, length), getattr(torch, options.dtype)
        if options.unit == "head" and self.shape.num_kv_heads == 1:
            raise ConfigError("the model has one KV head per layer: give --shares layer")
        self.vocabulary, tokenizer = vocabulary_of(options.model), load_tokenizer(options.model)
        sizes = {"vocab_size": self.vocabulary, "protect": options.protect}
        self.text: Text = read_text(list(options.data), tokenizer, length, options.rows, **sizes)
        self.prompt = prompt = max(prompt for _, prompt in self.text.measured + self.text.held_out)
        answer = length - prompt
        self.budgets = list(options.budgets) or [answer // part for part in BUDGETS]
        # a budget that evicts nothing would count as a perfect table
        if self.budgets[0] >= answer:
            raise ConfigError(
                f"--budget {self.budgets[0]} evicts nothing of {answer} tokens: lower it, or raise --length"
            )
        self._check_statistics()
        self._check_budgets()
        if self.options.rounds and self.decides == PROBE:
            raise ConfigError(
                f"--rounds {self.options.rounds} has no use under {PROBE}: leave it out, or give --policy"
            )
        if self.budgets[-1] - DEFAULT_SINKS <= self.sizes[0]:
            raise ConfigError(f"a budget of {self.budgets[-1]} is too small to divide: raise --budget or --length")
        self.shards = self._shards()
        # heads take most of the time, and layers that lose little have little to divide
        self.split = 0 if options.unit == "layer" else math.ceil(self.shape.num_layers / 2)

    def _check_statistics(self) -> None:
        """Check that the model rotates as statistics of queries need it, before anything is measured."""
        if FURTHER not in self.specs:
            return
        try:
            if self.shape.rope is None:
                raise ConfigError("layers of this model have different rotary embeddings, or none")
            check_rope(self.shape.rope, "the model's config")
        except ConfigError as error:
            self._leave_out(ConfigError(f"no statistics for {FURTHER}: {error}"))

    def _check_budgets(self) -> None:
        """Check that every policy can have every budget, before anything is measured."""
        for spec, budget in itertools.product([*self.specs.values()], self.budgets):
            if not policies.get(spec.policy).calibrated:
                spec.resolve(self.shape, budget)
                continue
            if spec.policy not in self.specs:  # left out by a larger budget
                continue
            # its statistics are measured first, and roles of slots need none
            cls, settings = policies.get(spec.policy), PolicySettings(spec.policy, budget)
            try:
                resolve_retention(settings, self.length, None, sinks=cls.default_sinks, window=cls.default_window)
            except ConfigError as error:
                self._leave_out(ConfigError(f"{spec.name}: {str(error).replace('--kv-', '--')}"))

    def _leave_out(self, reason: ConfigError) -> None:
        """Leave the policy with statistics out, or raise the reason if it was asked for."""
        if any(
            name and policies.get(name).calibrated for name in (self.options.policy, *(self.options.policies or ()))
        ):
            raise reason
        del self.specs[FURTHER]
        note(f"left out of the report, so that {self.decides} decides: {reason}")

    def _shards(self) -> list[Shard]:
        """Return the layers and heads that divide slots; layers' shares hold for the heads of all ranks."""
        heads, options = self.shape.num_kv_heads, self.options
        if heads % options.ranks and options.ranks % heads:
            raise ConfigError(
                f"--tensor-parallel-size {options.ranks} does not divide {heads} KV heads: choose another"
            )
        if options.stages > self.shape.model_layers:
            raise ConfigError(
                f"--pipeline-parallel-size {options.stages} is more than {self.shape.model_layers} layers: lower it"
            )
        stages = self.shape.stages(layers_of_stages(self.shape.model_layers, options.stages))
        if any(first == end for first, end in stages):
            raise ConfigError(
                f"a stage of --pipeline-parallel-size {options.stages} has no layer with full attention: lower it"
            )
        # shares of layers hold for the heads of all ranks of a stage
        ranks = options.ranks if options.unit == "head" else 1
        # more ranks than heads hold the same ones
        return list(dict.fromkeys(shards_of(stages, heads, ranks)))

    @property
    def decides(self) -> str:
        """Name of the policy that decides about shares."""
        return next(iter(self.specs))

    @property
    def sizes(self) -> list[int]:
        """Windows or, under a policy other than :data:`PROBE`, long-range slots at which layers and heads are measured."""
        sizes = sorted({max(2, (self.length - self.prompt) // part) for part in SIZES})
        # 0, since a head may do without long-range slots
        return sizes if self.decides == PROBE else [0, *sizes]

    @property
    def queries(self) -> int:
        """Number of last queries of a row that run again."""
        if {*self.shape.kinds} - {FULL, SLIDING, CHUNKED}:  # the state of a recurrent layer is that of a whole row
            return self.length
        if self.prompt and self.decides != PROBE:
            return self.length - self.prompt - 1
        return max(8, self.length // QUERIES)

    @property
    def rounds(self) -> int:
        """Most rounds in which a table of shares is improved."""
        default = ROUNDS if self.options.scorer is not None else 0
        return default if self.options.rounds is None else self.options.rounds

    @property
    def by_errors(self) -> bool:
        """Whether tables by the errors of attention are tried: for heads, under a policy (log of 2026-11-30)."""
        return self.decides != PROBE and self.options.unit == "head"

    @property
    def unit(self) -> str:
        """Name of the unit in records and tables, with ranks and stages where slots are divided among their heads."""
        ranks, stages = self.options.ranks, self.options.stages
        return self.options.unit + (f"-{ranks}x{stages}" if len(self.shards) > 1 else "")

    @property
    def stride(self) -> int:
        """Distance of the predictions of a row that are compared: after a prompt all, as few may be wrong."""
        return 1 if self.options.protect else STRIDE

    @property
    def searched(self) -> int:
        """Number of rows that tables and windows are chosen by, on the kernels of serving."""
        return SEARCHED if self.options.scorer is None else len(self.text.measured)

    @property
    def settings(self) -> dict:
        """Settings that measurements depend on."""
        files = sorted(
            file for suffix in ("safetensors", "bin") for file in Path(self.options.model).glob(f"*.{suffix}")
        )
        return {
            "version": VERSION,
            "model": [self.shape.model_type, self.shape.rope, [[file.name, _sample(file)] for file in files]],
            "data": [source.fingerprint() for source in find_sources(self.options.data or [TEXT])],
            "length": self.length,
            "rows": self.options.rows,
            "protect-prompt": self.options.protect,
            "dtype": self.options.dtype,
            "policy": self.decides,
            "scorer": self._scorer_samples(),
            "budgets": self.budgets,
        }

    def _scorer_samples(self) -> list[str] | None:
        """Return hashes of the scorer's tensors; its config changes when shares are written into it."""
        if self.options.scorer is None:
            return None
        folder, _, *tensors = files_of(self.options.scorer)
        return [_sample(folder / name) for name in tensors]

    @property
    def budget(self) -> int:
        """Budget at which a policy is recommended, and tables are improved: the middle one, in tokens."""
        return self.budgets[len(self.budgets) // 2]

    def layer_cost(self, layer: int, variants: int) -> float:
        """Return the work of measuring variants of a layer on a row, in dense passes of a row."""
        layers, number = self.shape.model_layers, self.shape.layers[layer] if self.shape.layers else layer
        return AGAIN * variants * self.queries / self.length * (layers - number) / layers

    def search_cost(self, tables: int) -> float:
        """Return the work of a row with so many tables of windows, in dense passes of a row."""
        return 1 + self.layer_cost(0, tables)

    @property
    def replays(self) -> float:
        """Work of measuring and searching, in dense passes of a row."""
        layers, count, heads = self.shape.num_layers, len(self.sizes), self.shape.num_kv_heads
        measured = 1 + sum(self.layer_cost(layer, count) for layer in range(layers))
        if self.split:  # which layers is not known beforehand
            measured += 1 + sum(self.layer_cost(layer, count * heads) for layer in range(layers)) * self.split / layers
        count = len(self.budgets)
        searched = self.search_cost(count * (2 * count + 1)) if self.decides == PROBE else 0
        return len(self.text.measured) * (measured + searched)

    @property
    def passes(self) -> float:
        """Work of passes under policies, in dense passes of a row."""
        return SERVED * sum(map(self.passes_of, self.specs))

    def takes_shares(self, name: str) -> bool:
        """Return whether a policy is in the report with shares too."""
        return takes_shares(name, self.decides)

    def passes_of(self, name: str) -> int:
        """Return the number of passes of a row under a policy, at most."""
        count = len(self.budgets)
        passes = (2 if self.takes_shares(name) else 1) * len(self.text.held_out) * count
        if name == self.decides:
            tables = 1 + (min(SHORTLIST, 2 * count) if name == PROBE else (4 if self.by_errors else 2) * count)
            passes += self.searched * (tables * count + (SHORTLIST + 1) * self.rounds * self.round_cost)
        if name != PROBE and self.specs[name].scorer is None:
            passes += 2 * self.searched * (1 + len(WINDOWS))
        return passes

    @property
    def round_cost(self) -> int:
        """Passes of a row in a round of improvement."""
        ranks = len({shard.heads for shard in self.shards})
        units = self.shape.num_layers * ranks + self.split * (self.shape.num_kv_heads - ranks)
        return 2 * (min(units, GROUPS) + ranks - 1) + 1 + 3 * len(self.budgets)


def _sample(file: Path) -> str:
    """Return a hash of a file's size, its beginning and its end."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        begin = opened.read(1 << 16)
        opened.seek(max(0, size - (1 << 16)))
        return hashlib.sha256(str(size).encode() + begin + opened.read()).hexdigest()[:16]
