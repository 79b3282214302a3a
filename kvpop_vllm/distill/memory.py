"""Memory, disk and time of a training run, counted from a model's sizes before anything is loaded.

Bytes are those of one GPU at the moment of a step in which it has most. ``tests/distill/test_memory.py`` holds them to
what torch counts of the trainer's own steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.model_hook import POSITIONS
from kvpop_vllm.model_shape import folder_sizes, kinds_of, read_model_config, text_config
from kvpop_vllm.scorers import build, make_config

FLOAT, LOW, INDEX = 4, 2, 8
"""Bytes of float32, bfloat16 and int64."""
TOKEN = 4
"""Bytes of a token in the file of tokens."""
SCORES = 7
"""Float32 or int32 numbers of a KV head, token and layer that losses of retention hold until the backward pass."""
SMALL_VOCABULARY = 1 << 16
"""Largest vocabulary whose indices are stored in 2 bytes."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model of equal dense layers, in numbers of parameters or of values of a token.

    Attributes:
        layers: number of layers.
        hidden: width of the residual stream.
        inner: width of an MLP.
        queries: values of all query heads.
        keys: values of all KV heads.
        heads: KV heads.
        vocabulary: tokens.
        head: parameters of the output layer.
        layer: parameters of a layer.
        rest: parameters outside layers: embeddings, output layer, last norm.
        scorer: parameters of a layer's scorer.
        scored: float32 values of a KV head in the backward pass of a scorer.
    """

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    heads: int
    vocabulary: int
    head: int
    layer: int
    rest: int
    scorer: int
    scored: int

    @classmethod
    def of(cls, folder: str | Path, recipe: Recipe) -> Sizes:
        """Return the sizes of a model in a folder and of the recipe's scorers.

        Raises:
            ConfigError: the config cannot be read, or the model has layers of several kinds or experts.
        """
        config = read_model_config(folder)
        text = text_config(config)
        _check_dense(folder, config, text)
        shape = folder_sizes(folder)
        with torch.device("meta"):
            model = _model(config)
            options = {"source": "the recipe"} | recipe.scorer_options()
            scorer = build(make_config(shape, **options), **recipe.scorer_sizes())
        count = {name: parameter.numel() for name, parameter in model.named_parameters()}
        in_layers = sum(number for name, number in count.items() if ".layers." in name)
        layers = shape["num_layers"]
        queries = text.num_attention_heads * shape["head_dim"]
        return cls(
            layers=layers,
            hidden=text.hidden_size,
            inner=text.intermediate_size,
            queries=queries,
            keys=shape["num_kv_heads"] * shape["head_dim"],
            heads=shape["num_kv_heads"],
            vocabulary=text.vocab_size,
            head=text.vocab_size * text.hidden_size,
            layer=in_layers // layers,
            rest=sum(count.values()) - in_layers,
            scorer=sum(parameter.numel() for parameter in scorer.parameters()),
            scored=_scored(scorer, shape["head_dim"]),
        )

    @property
    def base(self) -> int:
        """Parameters of the model without scorers."""
        return self.layers * self.layer + self.rest

    @property
    def products(self) -> int:
        """Parameters that a token is multiplied by on its way to the logits."""
        return self.layers * self.layer + self.head


def _scored(scorer: torch.nn.Module, size: int) -> int:
    """Return the float32 values of a KV head and token in the backward pass of a scorer: activations and their gradients.

    Args:
        scorer: the scorer.
        size: D, its key's and its value's channels.
    """
    weights = scorer.weights()
    if (
        scorer.config.scorer == "mlstm"
    ):  # key and value; features, before and after they are joined; values and readouts
        return 2 * size + 6 * weights.features + 4 * weights.value_size
    widest = max(parameter.shape[-1] for parameter in scorer.parameters() if parameter.dim() > 1)
    return 2 * size + 4 * widest


def _model(config: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def _check_dense(folder: str | Path, config: Any, text: Any) -> None:
    """Check that all layers of a model are alike and dense.

    Raises:
        ConfigError: they are not.
    """
    experts = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if getattr(text, name, None)]
    if experts or kinds_of(config):
        reason = "experts" if experts else "layers of several kinds"
        raise ConfigError(
            f"{folder} has {reason}, whose training memory kvpop plan --train does not count: choose another model"
        )
    written = json.loads((Path(folder) / "config.json").read_text())
    for name in ("intermediate_size", "vocab_size"):  # transformers would fill in those of another model
        if name not in written.get("text_config", written):
            raise ConfigError(f"{folder}: config.json has no {name}, on which training memory depends: complete it")


@dataclass(frozen=True)
class Run:
    """A training run of scorers, as its memory depends on it.

    Attributes:
        sizes: sizes of model and scorers.
        recipe: the recipe, of phase ``sparsify``.
        gpus: number of GPUs, with one process each.
        stored: True if the teacher's logits are read from disk.
    """

    sizes: Sizes
    recipe: Recipe
    gpus: int = 1
    stored: bool = False

    def __post_init__(self):
        recipe = self.recipe
        if recipe.batch % (self.gpus * recipe.micro_batch):
            raise ConfigError(
                f"batch {recipe.batch} cannot be shared by {self.gpus} GPUs with {recipe.micro_batch} rows a pass evenly:"
                " change one"
            )

    @property
    def sharded(self) -> bool:
        """True if parameters are gathered layer by layer."""
        return self.gpus > 1 or (self.recipe.trains_base and self.recipe.dtype == "bfloat16")

    @property
    def has_teacher(self) -> bool:
        """True if the run has the untrained model in memory."""
        return self.has_kl and not self.stored

    @property
    def has_kl(self) -> bool:
        """True if a loss compares logits with the teacher's."""
        return self.recipe.distils and self.recipe.kl > 0

    @property
    def low(self) -> int:
        """Bytes of a value that the model computes with."""
        return LOW if self.recipe.dtype == "bfloat16" else FLOAT

    @property
    def trained(self) -> int:
        """Trained parameters."""
        sizes = self.sizes
        return (sizes.base if self.recipe.trains_base else 0) + sizes.layers * sizes.scorer

    def lasting(self) -> dict[str, int]:
        """Return the bytes that a GPU has throughout, by part."""
        sizes, gpus = self.sizes, self.gpus
        frozen = 0 if self.recipe.trains_base else sizes.base * self.low
        return {
            "parameters": (self.trained * FLOAT + frozen) // gpus,
            "gradients": self.trained * FLOAT // gpus,
            "optimizer": 2 * self.trained * FLOAT // gpus,
            "teacher": sizes.base * self.low // gpus if self.has_teacher else 0,
        }

    def moments(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield the moments of a step that may have most, with the bytes that a GPU has then alone, by part."""
        sizes, low, base = self.sizes, self.low, self.recipe.trains_base
        tokens = self.recipe.micro_batch * self.recipe.length
        rest, layer = (sizes.rest * low, sizes.layer * low) if self.sharded else (0, 0)
        residual = tokens * sizes.hidden * low
        losses = tokens * sizes.layers * sizes.heads * SCORES * FLOAT
        top = tokens * self.recipe.kl_top * (FLOAT + INDEX) if self.has_kl else 0
        mlp = 3 * tokens * sizes.inner * low
        if not base:
            stored = tokens * sizes.layers * 2 * sizes.keys * low  # what scorers read
            inside = {"gathered": rest + 2 * layer, "checkpoints": stored, "losses": losses}
            yield "forward pass of a layer", inside | {"layer": mlp + 4 * residual}
            scorer = tokens * sizes.heads * sizes.scored * FLOAT
            yield "backward pass of a scorer", inside | {"gathered": rest, "layer": scorer}
            return
        inside = {"gathered": rest + layer, "losses": losses + top}
        norms = 2 * tokens * sizes.hidden * (FLOAT + 2 * low)
        attention = tokens * (sizes.queries * (FLOAT + 3 * low) + sizes.keys * (FLOAT + 5 * low))
        yield (
            "backward pass of a layer",
            inside
            | {
                "checkpoints": (sizes.layers - 1) * residual,
                "layer": norms + attention + mlp,
                "layer's gradients": mlp + residual + sizes.hidden * sizes.inner * low,
                "output layer's gradient": sizes.head * low,
                "reduced": sizes.layer * FLOAT,
            },
        )
        scorer = tokens * sizes.heads * sizes.scored * FLOAT
        yield (
            "backward pass of a scorer",
            inside
            | {
                "checkpoints": (sizes.layers - 1) * residual,
                "layer": norms // 2 + attention + scorer,
                "layer's gradients": residual + tokens * (sizes.queries + 2 * sizes.keys) * low,
                "output layer's gradient": sizes.head * low,
            },
        )
        logits = min(POSITIONS, self.recipe.length) * self.recipe.micro_batch * sizes.vocabulary
        yield (
            "loss at the output",
            inside
            | {
                "gathered": rest,
                "checkpoints": sizes.layers * residual,
                "layer": norms // 2 + logits * FLOAT,
                "layer's gradients": 3 * logits * FLOAT + residual,
                "output layer's gradient": sizes.head * low,
            },
        )
        yield "sum of the gradients of embeddings", {"gathered": rest, "reduced": sizes.rest * (low + FLOAT)}
        yield "optimizer's step", {"gathered": 0, "layer": self.trained * FLOAT // self.gpus}

    def peak(self) -> tuple[str, dict[str, int]]:
        """Return the moment in which a GPU has most, and the bytes by part."""
        moment, parts = max(self.moments(), key=lambda item: sum(item[1].values()))
        return moment, self.lasting() | parts

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        recipe = self.recipe
        return recipe.steps * recipe.batch * recipe.length

    def operations(self) -> int:
        """Return the floating-point operations of all steps; what is computed again does not count."""
        sizes, recipe = self.sizes, self.recipe
        window, topk = max(recipe.trained, key=sum)
        visible = min(recipe.sinks + window + topk, recipe.length // 2)
        passes = 3 if recipe.trains_base else 1  # the backward pass has two products for one
        products = sizes.products if recipe.distils else sizes.layers * sizes.layer  # else no logits are formed
        token = passes * (2 * products + 4 * sizes.layers * sizes.queries * visible)
        token += sizes.layers * (sizes.queries * recipe.length + 6 * sizes.scorer)  # targets, scorers with gradients
        if self.has_teacher:
            token += 2 * sizes.products + 2 * sizes.layers * sizes.queries * recipe.length
        return token * self.tokens

    def disk(self) -> dict[str, int]:
        """Return the bytes on the disk: of a checkpoint, the result, tokens in files, and the teacher's logits of all rows."""
        indices = 2 if self.sizes.vocabulary <= SMALL_VOCABULARY else 4
        position = self.recipe.kl_top * (2 + indices) + 8
        result = self.sizes.layers * self.sizes.scorer * FLOAT + (
            self.sizes.base * self.low if self.recipe.trains_base else 0
        )
        return {
            "checkpoint": 3 * self.trained * FLOAT,
            "result": result,
            "tokens": TOKEN * self.tokens,
            "teacher's logits": position * self.tokens if self.has_kl else 0,
        }
