"""Folders of full checkpoints of other authors: their sizes, what their config says, and their tensors.

Only JSON and safetensors files are opened. No code of the folder is imported. ``kvpop import`` may also read pickles,
by torch's restricted unpickler.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.model_shape import check_base, folder_sizes
from kvpop_vllm.scorers.config_keys import Facts, facts_of
from kvpop_vllm.scorers.tensor_matching import Sizes
from kvpop_vllm.supported import base_keys, published_base
from kvpop_vllm.tensor_files import reading, unpickled

INDEX = "model.safetensors.index.json"
MODEL_NAMES = re.compile(
    r"^(model\.)?(embed_tokens|norm|lm_head|layers\.\d+\."
    r"(self_attn\.([qkvo]_proj|qkv_proj|[qk]_norm|rotary_emb)|mlp\.(gate|up|down|gate_up)_proj|input_layernorm|post_attention_layernorm))\."
    r"(weight|bias|inv_freq|weight_(scale|scale_inv|packed|shape|zero_point|g_idx)|input_scale|[kv]_scale|qweight|qzeros|scales|g_idx)$"
)
"""Pattern of Llama's and Qwen3's own tensors, also quantised."""


@dataclass
class Checkpoint:
    """Full checkpoint of other authors in a folder.

    Attributes:
        folder: the folder.
        config: contents of its ``config.json``.
        base: model type of its base model.
        sizes: sizes of the model, as :func:`kvpop_vllm.model_shape.folder_sizes` returns them.
        facts: what its config says about the scorer.
        shapes: shapes of the scorer's tensors by name.
        files: file of each tensor by name.
    """

    folder: Path
    config: Mapping
    base: str
    sizes: dict
    facts: Facts
    shapes: dict[str, tuple[int, ...]]
    files: dict[str, Path]
    _unpickled: dict[str, torch.Tensor] = field(default_factory=dict)
    _read: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def small(self) -> Sizes:
        """Sizes that readings depend on."""
        return Sizes(self.sizes["num_layers"], self.sizes["num_kv_heads"], self.sizes["head_dim"])

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, float32."""
        if name in self._unpickled:
            return self._unpickled[name].float()
        if name not in self._read:
            with reading(self.files[name]), safe_open(self.files[name], "pt") as file:
                self._read[name] = file.get_tensor(name)
        tensor = self._read[name]
        if not tensor.is_floating_point():
            raise ConfigError(f"{self.folder}: tensor {name} holds {tensor.dtype}, and scorers are of floating point")
        return tensor.float()


def is_published(folder: str | Path) -> bool:
    """Return whether a folder is a full checkpoint of other authors, by its ``config.json``."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return False
    config = read_json(path, "give the folder of a Hugging Face model")
    return isinstance(config, Mapping) and published_base(config) is not None


def open_checkpoint(folder: str | Path, *, pickles: bool = False) -> Checkpoint:
    """Return a folder's checkpoint, its tensors unread.

    Args:
        folder: folder of a full checkpoint.
        pickles: True to read pickled weights where there are no safetensors files (``kvpop import``).
    """
    folder = Path(folder)
    config = read_json(folder / "config.json", "give the folder of a full checkpoint")
    base = published_base(config) if isinstance(config, Mapping) else None
    if base is None:
        raise ConfigError(
            f"{folder}: neither model type nor architecture in config.json names KVpop: give a KVpop checkpoint"
        )
    check_base(base, folder / "config.json")
    sizes = folder_sizes(folder)
    facts = facts_of(config, model_keys(config, base), str(folder / "config.json"))
    shapes, files, in_memory = _shapes(folder, pickles)
    if odd := [name for name in shapes if not name.isprintable()]:
        raise ConfigError(f"{folder}: {odd[0]!r} is no name of a tensor: give another checkpoint")
    _check_base_tensors(shapes, sizes, folder)
    scorer = {name: shape for name, shape in shapes.items() if not MODEL_NAMES.match(name)}
    if not scorer:
        raise ConfigError(f"{folder} has no tensors but the base model's, so no scorer: give --kv-scorer DIR")
    return Checkpoint(folder, config, base, sizes, facts, scorer, files, in_memory)


def model_keys(config: Mapping, base: str) -> frozenset[str]:
    """Return the keys of a ``config.json`` that are of the base model, or name classes and versions."""
    common_keys = {"architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "name_or_path"}
    return frozenset({*base_keys(config, base), *common_keys})


def unread_lines(file: str, names: Iterable[str]) -> list[str]:
    """Return a line of the keys that were not read in a file, no line if there are none."""
    names = ", ".join(sorted(name if name.isprintable() else repr(name) for name in names))
    return [f"not read in {file}: {names}"] if names else []


def _shapes(folder: Path, pickles: bool) -> tuple[dict, dict[str, Path], dict[str, torch.Tensor]]:
    paths = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, "copy the folder again")
        weight_map = index.get("weight_map") if isinstance(index, Mapping) else None
        if not isinstance(weight_map, Mapping) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ConfigError(f"{folder / INDEX} has no weight_map: copy the folder again")
        listed = sorted(set(weight_map.values()))
        if missing := sorted(set(listed) - {path.name for path in folder.iterdir() if path.is_file()}):
            raise ConfigError(f"{folder} has no file {missing[0]!r}, which its index names: complete the folder")
        paths = [folder / file for file in listed]
    if not paths:
        return _unpickle(folder, pickles)
    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, Path] = {}
    for path in paths:
        with reading(path), safe_open(path, "pt") as file:
            for name in file.keys():
                # which of two would be loaded depends on the loader
                if name in shapes:
                    raise ConfigError(
                        f"{folder}: tensor {name!r} is in {files[name].name} and in {path.name}: remove one"
                    )
                shapes[name], files[name] = tuple(file.get_slice(name).get_shape()), path
    return shapes, files, {}


def _unpickle(folder: Path, pickles: bool) -> tuple[dict, dict[str, Path], dict[str, torch.Tensor]]:
    paths = sorted(folder.glob("pytorch_model*.bin"))
    if not paths:
        raise ConfigError(f"{folder} has no safetensors files: complete the folder")
    if not pickles:
        raise ConfigError(
            f"{folder} has no safetensors files, and {paths[0].name} is a pickle: convert it with 'kvpop import'"
        )
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        tensors |= unpickled(path, "give a checkpoint's folder")
    return {name: tuple(t.shape) for name, t in tensors.items()}, {}, tensors


def _check_base_tensors(shapes: Mapping[str, tuple[int, ...]], sizes: Mapping, folder: Path) -> None:
    """Check that keys and values have the heads that ``config.json`` says, in every layer."""
    width = sizes["num_kv_heads"] * sizes["head_dim"]
    for layer in range(sizes["num_layers"]):
        for part in ("k", "v"):
            # a decoder that was saved alone has names without the prefix
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            shape = shapes.get(name, shapes.get(name.removeprefix("model.")))
            if shape is None:
                raise ConfigError(f"{folder}: the base model's tensor {name} is missing: complete the folder")
            if len(shape) == 2 and shape[0] != width:
                raise ConfigError(
                    f"{folder}: {name} is {list(shape)}, and config.json says {width} rows: one of the two is wrong"
                )
