"""``kvpop import`` of cartridges as HazyResearch/cartridges saves them.

A file is a pickle of a dict with ``trainable_keys``, ``trainable_values``, ``fixed_keys`` and ``fixed_values``
(also read as ``frozen_keys`` and ``frozen_values``), each a list with one ``[1, H, p, D]`` tensor per layer.
Fixed tokens come first. Own tokens go on after the last of them, at the position that is their number.

The pickle is read in a process of its own (:mod:`kvpop_vllm.compaction.unpickle`), by torch's restricted
unpickler and with limited memory. That process hands over a safetensors file, which is read as untrusted data.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvpop_vllm import __version__
from kvpop_vllm.cache.pages import BLOCK_SLOTS
from kvpop_vllm.compaction.base_model import base_of
from kvpop_vllm.compaction.cartridge import PICKLES, TENSORS_NAME, CartridgeConfig, Layer, write_cartridge
from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import add_file, check_new
from kvpop_vllm.rules.matching import padded

SUFFIXES = (*PICKLES, ".torch")
SECONDS = 600
"""Longest time that the reading process may take."""


def published_cartridge(source: str | Path) -> Path | None:
    """Return the pickle of a cartridge that a path names, or None.

    It is the path itself, or the only pickle of a folder without a ``config.json``.
    """
    source = Path(source)
    if source.is_file():
        return source
    if not source.is_dir() or (source / "config.json").exists():
        return None
    files = sorted(path for path in source.iterdir() if path.suffix in SUFFIXES)
    if len(files) > 1:
        raise ConfigError(f"{source} has {len(files)} pickles, {files[0].name} and others: give the path of one")
    return files[0] if files else None


def import_cartridge(source: str | Path, out: str | Path, model: str | Path) -> CartridgeConfig:
    """Write a cartridge folder from a published cartridge, and return its config.

    Slots up to a multiple of 64 are added. They have no weight.

    Args:
        source: the pickle.
        out: folder to write.
        model: folder of the base model.
    """
    source = Path(source)
    check_new(out)
    base = base_of(model)
    with TemporaryDirectory() as folder:
        tensors = _read_apart(source, Path(folder) / TENSORS_NAME)
        layers, tokens = layers_of(tensors, base, str(source))
    slots = layers[0][0].shape[1]
    digest = hashlib.sha256()
    add_file(digest, source)
    provenance = {"kvpop": __version__, "source": {"name": source.name, "sha256": digest.hexdigest()}}
    config = CartridgeConfig(**base, slots=slots, next_position=tokens, method="cartridges", provenance=provenance)
    write_cartridge(out, config, layers)
    return config


def _read_apart(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a pickle by name and layer, such as ``trainable_keys.0``."""
    command = [sys.executable, "-m", "kvpop_vllm.compaction.unpickle", str(source.resolve()), str(target)]
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    root = str(Path(__file__).resolve().parents[2])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    try:
        outcome = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=SECONDS, cwd=target.parent
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{source} was not read within {SECONDS} s: give a smaller file") from None
    if outcome.returncode or not target.is_file():
        lines = outcome.stderr.strip().splitlines() or [f"exit code {outcome.returncode}"]
        raise ConfigError(f"{source} cannot be read as a cartridge's tensors alone: {lines[-1][:200]}")
    try:
        return load_file(target)
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{source} cannot be read: {str(error).splitlines()[0]}") from None


def layers_of(tensors: dict[str, torch.Tensor], base: dict, source: str) -> tuple[list[Layer], int]:
    """Return a cartridge's layers and its number of tokens.

    Args:
        tensors: tensors by name and layer, such as ``trainable_keys.0``.
        base: from :func:`kvpop_vllm.compaction.base_model.base_of`.
        source: names the file in errors.
    """
    layers, tokens, tensors = [], None, dict(tensors)
    for i in range(base["num_layers"]):
        pair = []
        for part in ("keys", "values"):
            pieces = [tensors.pop(f"{kind}_{part}.{i}", None) for kind in ("fixed", "trainable")]
            pieces = [piece for piece in pieces if piece is not None]
            if not pieces:
                raise ConfigError(f"{source} has no {part} of layer {i}: give --model the cartridge's base model")
            for piece in pieces:
                shape = (1, base["num_kv_heads"], piece.shape[2] if piece.dim() == 4 else 0, base["head_dim"])
                if tuple(piece.shape) != shape:
                    raise ConfigError(
                        f"{source}: {part} of layer {i} have shape {tuple(piece.shape)}, the model's are"
                        f" (1, {shape[1]}, p, {shape[3]}): give --model the cartridge's base model"
                    )
            pair.append(torch.cat(pieces, 2)[0])
        tokens = pair[0].shape[1] if tokens is None else tokens
        if {tokens} != {tensor.shape[1] for tensor in pair} or not tokens:
            raise ConfigError(f"{source}: layer {i} has another number of tokens than layer 0: give a whole cartridge")
        slots = -(-tokens // BLOCK_SLOTS) * BLOCK_SLOTS
        k, v, bias = padded(*pair, pair[0].new_zeros(pair[0].shape[:2], dtype=torch.float32), slots)
        layers.append((k, v, bias if slots > tokens else None))
    if tensors:
        raise ConfigError(
            f"{source} has {sorted(tensors)[0]}, a layer that the model lacks: give --model its base model"
        )
    return layers, tokens
