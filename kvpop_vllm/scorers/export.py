"""``kvpop export``: write a full checkpoint from a base model and a scorer.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import replacing
from kvpop_vllm.model_shape import folder_sizes
from kvpop_vllm.scorers.checkpoint import (
    check_model,
    full_checkpoint_target,
    looks_like_scorer,
    read_scorer,
)
from kvpop_vllm.supported import ARCHITECTURES, FULL_CHECKPOINT_SUFFIX, refused_beside
from kvpop_vllm.tensor_files import save_tensors

INDEX = "model.safetensors.index.json"
SCORER_SHARD = "model-kvpop.safetensors"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def export_checkpoint(base: str | Path, adapter: str | Path, out: str | Path) -> None:
    """Write a folder that ``vllm serve OUT --kv-policy ...`` serves without a scorer folder.

    The files of the base model are copied unchanged, and the scorer is added as one more shard. ``out``
    appears complete or not at all.

    Args:
        base: Hugging Face folder of a Llama or Qwen3 model.
        adapter: scorer folder.
        out: output folder. Must not exist or be empty.
    """
    base, adapter, out = Path(base), Path(adapter), Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder: name another one")
    shape = folder_sizes(base)
    kind = shape["model_type"]
    if kind not in list(ARCHITECTURES):  # kind may be unhashable, such as a list
        raise ConfigError(
            f"{base}: model type {kind!r} cannot carry scorers, only {', '.join(ARCHITECTURES)} can: serve it with --kv-scorer instead"
        )
    if reason := refused_beside(shape.get("kinds", ()), carried=True):
        raise ConfigError(f"{base}: {reason}: serve it with --kv-scorer instead")
    config = json.loads((base / "config.json").read_text())
    # folder_sizes() says the base of a full checkpoint, and config.json the checkpoint's own type
    if config["model_type"] != kind:
        raise ConfigError(f"{base} carries a scorer already: name the base model it was exported from")
    scorer, layers = read_scorer(adapter)
    check_model(scorer, **shape, source=str(adapter))
    shards = _Shards(base)
    config |= {"architectures": [ARCHITECTURES[kind]], "model_type": kind + FULL_CHECKPOINT_SUFFIX}
    if config.get("dtype", config.get("torch_dtype")) is None:
        config["dtype"] = shards.dtype()  # vLLM would guess it from the shards, and the scorer's is float32
    config["kvpop"] = scorer.to_json()

    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as folder:
        folder.mkdir()
        _copy_other_files(base, folder)
        tensors = {full_checkpoint_target(i, name): t for i, layer in enumerate(layers) for name, t in layer.items()}
        shards.write(folder, {name: tensor.contiguous() for name, tensor in tensors.items()})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _copy_other_files(base: Path, target: Path) -> None:
    """Copy all files except weights, their index and the config: tokenizer, templates, licence and so on."""
    for file in base.iterdir():
        weights = file.name.endswith((*_WEIGHTS, ".index.json")) or file.name == "config.json"
        if file.is_file() and not weights and not file.name.startswith("."):
            shutil.copyfile(file, target / file.name)
    templates = base / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, target / templates.name)


class _Shards:
    """Safetensors files of the base model, as listed by its index, or ``model.safetensors``.

    Attributes:
        headers: file name -> tensor name -> dtype and bytes.
    """

    def __init__(self, base: Path):
        self.base = base
        if (base / INDEX).is_file():
            names = _indexed(base / INDEX)
        else:
            names = ["model.safetensors"]
        self.headers = {name: _header(base / name) for name in names}
        if carried := [n for header in self.headers.values() for n in header if looks_like_scorer(n)]:
            raise ConfigError(f"{base} carries scorer tensors already, such as {carried[0]}: give the base model")

    def dtype(self) -> str:
        """Return the dtype that takes the most bytes in the base model's files."""
        counts = Counter()
        for header in self.headers.values():
            for dtype, size in header.values():
                counts[dtype] += size
        commonest = counts.most_common(1)[0][0]
        return _DTYPES.get(commonest, "float32")

    def write(self, target: Path, scorer: dict) -> None:
        """Copy the base model's files, add the scorer's, and write the index of all.

        A single ``model.safetensors`` gets a numbered name, because many readers would read no other file
        next to it.
        """
        names = {name: name for name in self.headers}
        if list(names) == ["model.safetensors"]:
            names = {"model.safetensors": "model-00001-of-00001.safetensors"}
        for source, name in names.items():
            shutil.copyfile(self.base / source, target / name)
        save_tensors(scorer, target / SCORER_SHARD, mode_of=target / name)
        headers = {names[source]: header for source, header in self.headers.items()}
        headers[SCORER_SHARD] = _header(target / SCORER_SHARD)
        index = {
            "metadata": {"total_size": sum(size for header in headers.values() for _, size in header.values())},
            "weight_map": {name: file for file, header in headers.items() for name in sorted(header)},
        }
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _indexed(path: Path) -> list[str]:
    """Return the file names in an index."""
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        # a path would be copied to another place
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(f"weight_map names the files {names}")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(f"{path} is not an index of safetensors files in its folder: {error!r}") from None
    return names


def _header(path: Path) -> dict[str, tuple[str, int]]:
    """Return dtype and bytes of the tensors of a safetensors file."""
    try:
        with path.open("rb"), safe_open(path, "pt") as file:  # checks the header and the length of the file
            header = {name: _dtype_and_size(file.get_slice(name)) for name in file.keys()}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): export needs safetensors weights") from None
    except (SafetensorError, ValueError):
        raise ConfigError(f"{path} is not a complete safetensors file") from None
    if not header:
        raise ConfigError(f"{path} holds no tensors: give the folder of a model with its weights")
    return header


def _dtype_and_size(tensor) -> tuple[str, int]:
    dtype = tensor.get_dtype()  # such as BF16, F8_E4M3 or BOOL
    # BOOL has no number, and takes a byte
    bits = re.search(r"\d+", dtype) or ["8"]
    return dtype, math.prod(tensor.get_shape()) * int(bits[0]) // 8
