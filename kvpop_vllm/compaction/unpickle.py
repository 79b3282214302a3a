"""Process that reads the pickle of a published cartridge and writes its tensors as a safetensors file.

Usage: ``python -m kvpop_vllm.compaction.unpickle SOURCE TARGET``. torch's restricted unpickler makes tensors, plain
containers and lists of parameters only. Memory and the written file are limited by the size of the source.
"""

import resource
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

NAMES = {f"{kind}_{part}": f"{kind}_{part}" for kind in ("trainable", "fixed") for part in ("keys", "values")}
NAMES |= {f"frozen_{part}": f"fixed_{part}" for part in ("keys", "values")}
"""Name in the file to name in the output. Other names are refused."""
OVERHEAD = 6 << 30
"""Bytes of address space for the process itself."""


def tensors_of(value: object, name: str) -> list[torch.Tensor]:
    """Return the tensors of a list, tuple or list of parameters.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, torch.nn.ParameterList):
        value = list(value.__dict__.get("_parameters", {}).values())
    if not isinstance(value, list | tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in value):
        raise ValueError(f"{name} is not a list of tensors")
    return [tensor.detach() for tensor in value]


def main(source: Path, target: Path) -> None:
    """Read SOURCE and write TARGET.

    Raises:
        ValueError: the file holds something else than a cartridge.
    """
    size = source.stat().st_size
    # a hostile file can neither fill the memory nor the disk, nor leave a core
    resource.setrlimit(resource.RLIMIT_AS, (OVERHEAD + 4 * size, OVERHEAD + 4 * size))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size + (1 << 20), 2 * size + (1 << 20)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with torch.serialization.safe_globals([torch.nn.ParameterList]):
        tensors = torch.load(source, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not {"trainable_keys", "trainable_values"} <= set(tensors):
        raise ValueError("no dict with trainable_keys and trainable_values")
    if unknown := sorted(set(tensors) - set(NAMES), key=str):
        raise ValueError(f"unknown key {unknown[0]!r}")
    if twice := [part for part in ("keys", "values") if {f"fixed_{part}", f"frozen_{part}"} <= set(tensors)]:
        raise ValueError(f"fixed_{twice[0]} and frozen_{twice[0]}, which are two names of the same")
    named = {f"{NAMES[n]}.{i}": t for n, value in tensors.items() for i, t in enumerate(tensors_of(value, n))}
    # views of one storage could stand for many times the file
    if sum(t.numel() * t.element_size() for t in named.values()) > 2 * size:
        raise ValueError("tensors that are larger than the file")
    # views of one storage, which safetensors refuses to write
    save_file({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}, target)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # a damaged pickle may raise anything
        text = " ".join(str(error).split())
        reason = "it holds more than tensors and lists" if "Unsupported" in text or "Weights only" in text else text
        print(f"{type(error).__name__}: {reason[:160]}", file=sys.stderr)
        sys.exit(1)
