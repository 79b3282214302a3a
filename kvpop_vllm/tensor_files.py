"""Safetensors files of scorers, cartridges and compactors, and folders of a config with its tensors.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import replacing


def require_files(folder: str | Path, *names: str, kind: str, advice: str) -> None:
    """Refuse a folder that lacks one of these files. ``kind`` says what it should be, ``advice`` ends the error."""
    for name in names:
        if not (Path(folder) / name).is_file():
            raise ConfigError(f"no {kind} at {str(folder)!r}: {name} is missing; {advice}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name a safetensors file in the error if it cannot be read."""
    try:
        yield
    except ConfigError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        with open(path, "rb") as file:
            start = file.read(2)
        # a zip archive, as torch writes, or a pickle's protocol byte
        pickled = start == b"PK" or start[:1] == b"\x80"
        advice = "it is a pickle, convert it with 'kvpop import'" if pickled else "copy or write it again"
        raise ConfigError(f"{path} is not a complete safetensors file ({reason}): {advice}") from None


def unpickled(path: Path, advice: str) -> dict[str, torch.Tensor]:
    """Return the named tensors of a pickle, by torch's restricted unpickler. ``advice`` ends the error."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise any
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{path} cannot be read as tensors alone: {reason}") from None
    named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not named or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} holds something else than named tensors: {advice}")
    return tensors


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, mode_of: Path) -> None:
    """Write a safetensors file with the permissions of the file ``mode_of``.

    safetensors itself would make the file readable for its owner only.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        # as transformers writes it, older versions of which look for it
        save_file(tensors, path, metadata={"format": "pt"})
    # callers handle a full disk as an OSError
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
    shutil.copymode(mode_of, path)


def write_files(
    folder: Path, config_name: str, config: dict, tensors_name: str, tensors: dict[str, torch.Tensor]
) -> None:
    """Write a JSON config and its tensors into a folder, each file whole or not at all, the config last.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # the config is renamed last: where it is, the tensors are complete
    with replacing(folder / config_name) as text, replacing(folder / tensors_name) as draft:
        text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_tensors(tensors, draft, mode_of=text)


def write_folder(folder: Path, *files) -> None:
    """Write a folder of a JSON config and its tensors, whole or not at all. ``files`` are those of :func:`write_files`.

    Raises:
        OSError: a file cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as draft:
        write_files(draft, *files)
