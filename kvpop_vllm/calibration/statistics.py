"""Statistics of a model's queries, format version 1, which the policy ``triattention`` ranks keys by.

A folder holds ``queries.json`` and ``queries.safetensors``. Statistics are those of queries as they
would be at position 0: rotary embeddings are undone, factors on them (YaRN) are left in. A band is a pair of channels
that rotate together, or a single channel that does not rotate. Bands are numbered by their first channels. Per layer i
the second file has, in float32,

=====================  ===========  ==================================
tensor                 shape        content
=====================  ===========  ==================================
``layers.{i}.mean``    ``[Hq, D]``  mean query
``layers.{i}.norm``    ``[Hq, F]``  mean norm of the query in each band
=====================  ===========  ==================================

Functions that read or check a file raise ConfigError.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.rope import band_norms, check_rope, inverse_frequencies, rope_at
from kvpop_vllm.schemas import NAME, Schema, check_same_model, integer
from kvpop_vllm.tensor_files import reading, require_files, write_files

ADVICE = "calibrate the model again"
SCHEMA = Schema("query-statistics", advice=f": {ADVICE}")
CONFIG_NAME = "queries.json"
TENSORS_NAME = "queries.safetensors"
RULES = {"model_type": NAME, "tokens": integer(1, 2**62)} | dict.fromkeys(
    ("num_layers", "num_heads", "num_kv_heads", "head_dim"), integer(1)
)
SLACK = 1e-3
"""Relative rounding error by which the norm of a mean may exceed the mean norm."""


@dataclass(frozen=True)
class QueryStatistics:
    """Statistics of the queries of a model.

    Attributes:
        model_type: model type of the model, as in ``config.json``.
        num_layers: number of layers with full attention, in most models all.
        num_heads: query heads of a layer, Hq.
        num_kv_heads: KV heads of a layer, H.
        head_dim: D, head size.
        rope: rope parameters (:func:`kvpop_vllm.rope.rope_of`).
        tokens: number of tokens that the statistics are means over.
        mean: ``[Hq, D]`` float32 of each layer, mean query.
        norm: ``[Hq, F]`` float32 of each layer, mean norm of the query in each band.
        layers: indices in the model of the layers, empty if these are all.
    """

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: dict
    tokens: int
    mean: list[torch.Tensor]
    norm: list[torch.Tensor]
    layers: tuple[int, ...] = ()

    def frequencies(self, layer: int) -> torch.Tensor:
        """Return the angles per position ``[pairs]`` (radians, float64) of the pairs of channels that a layer rotates."""
        rope = rope_at(self.rope, layer)
        return torch.zeros(0).double() if rope is None else inverse_frequencies(rope, self.head_dim).double()

    def check(self, source: str) -> None:
        """Check sizes, rope parameters and tensors; ``source`` names the folder in errors."""
        SCHEMA.check(vars(self), RULES, source)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{source}: {self.num_kv_heads} KV heads do not divide {self.num_heads} heads: {ADVICE}")
        check_rope(self.rope, source)
        for layer, (mean, norm) in enumerate(zip(self.mean, self.norm, strict=True)):
            pairs = len(self.frequencies(layer))
            # a band for each pair and for each single channel: D - pairs
            shapes = {"mean": (mean, self.head_dim), "norm": (norm, self.head_dim - pairs)}
            for name, (tensor, width) in shapes.items():
                named = f"{source}: tensor layers.{layer}.{name}"
                if tuple(tensor.shape) != (self.num_heads, width):
                    expected = (self.num_heads, width)
                    raise ConfigError(f"{named} has shape {tuple(tensor.shape)}, expected {expected}: {ADVICE}")
                if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
                    raise ConfigError(f"{named} holds values that are not finite float32 numbers: {ADVICE}")
            # a mean is never longer than the mean length of its vectors
            if bool((band_norms(mean, pairs) > norm * (1 + SLACK) + 1e-6).any()):
                raise ConfigError(
                    f"{source}: tensor layers.{layer}.norm is below the norm of layers.{layer}.mean, which no queries have:"
                    f" {ADVICE}"
                )

    def check_model(self, source: str, **model: object) -> None:
        """Check that the statistics are those of a model.

        Args:
            source: name of the folder in errors.
            model: sizes of the model and ``rope``, by the names of the attributes, and its ``wide_window``.
        """
        if model["rope"] is None:
            raise ConfigError("layers of this model have different rotary embeddings, or none: choose another policy")
        made_for = {name: getattr(self, name) for name in model if name != "wide_window"}
        check_same_model(made_for, model, source, "calibrate this model, or give its folder with --kv-calibration")


def read_statistics(folder: str | Path) -> QueryStatistics:
    """Return the checked statistics of a folder."""
    path, tensors_path = Path(folder) / CONFIG_NAME, Path(folder) / TENSORS_NAME
    advice = "give a folder of 'kvpop calibrate'"
    require_files(folder, CONFIG_NAME, TENSORS_NAME, kind="statistics", advice=advice)
    config = SCHEMA.body(read_json(path, ADVICE), str(path))
    SCHEMA.check_keys(config, [*RULES, "rope", "layers"], ("layers",), str(path))
    SCHEMA.check(config, RULES, str(path))
    config["layers"] = tuple(SCHEMA.layers(config, str(path)))
    with reading(tensors_path):
        tensors = load_file(tensors_path)
    layers = config["num_layers"]
    # a wrong count ends here, before a name is made for every layer that the file claims
    if len(tensors) != 2 * layers:
        raise ConfigError(f"{tensors_path} holds {len(tensors)} tensors, not 2 for each of {layers} layers: {ADVICE}")
    names = {f"layers.{i}.{name}" for i in range(layers) for name in ("mean", "norm")}
    if wrong := sorted(tensors.keys() ^ names):
        raise ConfigError(
            f"{tensors_path}: tensor {wrong[0]} is {'unexpected' if wrong[0] in tensors else 'missing'}: {ADVICE}"
        )
    by_name = {name: [tensors[f"layers.{i}.{name}"] for i in range(layers)] for name in ("mean", "norm")}
    statistics = QueryStatistics(**config, **by_name)
    statistics.check(str(folder))
    return statistics


def write_statistics(folder: str | Path, statistics: QueryStatistics) -> None:
    """Check statistics and write them into a folder.

    Each file appears complete or not at all.

    Raises:
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    statistics.check(str(folder))
    omitted = "mean", "norm", *(() if statistics.layers else ("layers",))
    config = {name: value for name, value in asdict(statistics).items() if name not in omitted}
    by_name = {"mean": statistics.mean, "norm": statistics.norm}
    # safetensors writes contiguous tensors only
    flat = {f"layers.{i}.{name}": t.contiguous() for name, layers in by_name.items() for i, t in enumerate(layers)}
    write_files(folder, CONFIG_NAME, SCHEMA.header | config, TENSORS_NAME, flat)
