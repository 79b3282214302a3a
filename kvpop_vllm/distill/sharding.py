"""Shards of a trained model over the processes of a run (FSDP2), and the reading of weights into them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, GenerationConfig

from kvpop_vllm.model_hook import NAME, config_to_load, decoder_of
from kvpop_vllm.scorers.published_checkpoint import is_published

IN_FLOAT32 = "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"
"""Attributes of models that name what transformers loads in float32, whatever dtype is asked for."""
FLOATS = {"F64", "F32", "F16", "BF16"}
"""Dtypes of stored tensors that are values of weights, as safetensors names them; others are codes."""


@dataclass
class Process:
    """Training process in its group; a context manager that leaves the group at its end.

    Attributes:
        rank: rank of this process.
        world: number of processes.
        device: device of this process.
        group: mesh of all processes; None if this one is alone.
        joined: True if this object has joined a group, which it has to leave.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")
    group: DeviceMesh | None = None
    joined: bool = False

    @classmethod
    def start(cls) -> Process:
        """Join torchrun's group if there is one; use one CUDA device per process if there are any.

        On such a device products of float32 become TF32's in this process: those of scorers, and of a base in float32.
        """
        if cuda := torch.cuda.is_available():
            torch.set_float32_matmul_precision("high")
        if "WORLD_SIZE" not in os.environ:
            return cls(device=torch.device("cuda" if cuda else "cpu"))
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
        world = dist.get_world_size()
        return cls(dist.get_rank(), world, device, init_device_mesh(device.type, (world,)), joined=True)

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of all processes; one that is alone joins a group of its own."""
        if self.group is not None:
            return self.group
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self.joined = True
        return init_device_mesh(self.device.type, (1,))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Leave the group.

        After an error this does not wait, because other processes may be waiting for this one.
        """
        if not self.joined:
            return
        self.joined = False
        if kind is not None and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()

    def leave_own(self) -> None:
        """Leave the group that this process has joined alone, if it has."""
        if self.group is None:
            self.__exit__(None, None, None)


def policy_of(mixed: bool) -> MixedPrecisionPolicy:
    """Return the dtypes of a shard's gathered parameters and of sums of gradients.

    Args:
        mixed: True to compute with bfloat16 copies of float32 parameters and to add their gradients in float32.
    """
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()


def shard_layers(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard the layers of a model, one group each; other parameters are left to the group of the root."""
    for layer in decoder_of(model).layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)


def empty_model(folder: str | Path, dtype: torch.dtype, logits: bool = True) -> nn.Module | None:
    """Return the model of :func:`kvpop_vllm.model_hook.load_model` with parameters on the meta device.

    Returns:
        The model, or None if its safetensors files do not hold each parameter and saved buffer by its name and shape,
        in a float of at least 16 bits, and nothing else.

    Raises:
        ConfigError: as of ``load_model``, but for what is wrong with weights.
    """
    config = config_to_load(folder, logits)
    if is_published(folder) or (Path(folder) / "adapter_config.json").exists():
        return None
    # transformers changes such weights while it loads them, which a reader of shards would not
    if any(getattr(config, name, None) for name in ("quantization_config", "transformers_weights")):
        return None
    with _parameters_on_meta():
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
        except (ValueError, RuntimeError):
            return None
    model.tie_weights()
    model.config.use_cache = False
    if dtype != torch.float32 and any(getattr(model, name, None) for name in IN_FLOAT32):
        return None
    if model.can_generate():
        with suppress(OSError):  # there is no generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval() if _stored(folder) == {name: tuple(t.shape) for name, t in _saved(model).items()} else None


def read_weights(model: nn.Module, folder: str | Path, device: torch.device) -> None:
    """Read the weights of a sharded model of :func:`empty_model`; a process reads its shards alone.

    Args:
        model: the model, after ``fully_shard`` of all that holds its parameters.
        folder: folder of the model.
        device: device of the shards.
    """
    # to_empty drops the values of buffers too, and those that are not saved come from no file
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    state = {name: tensor.detach() for name, tensor in _saved(model).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a single process loads "non-collectively"
        dcp.load(state, storage_reader=_Reader(folder))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that are made meanwhile on the meta device; buffers have their values."""
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    # torch.device("meta") would take the values of buffers away as well
    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


class _Reader(HuggingFaceStorageReader):
    """Reader of the weights that transformers takes from a folder."""

    def __init__(self, folder: str | Path):
        super().__init__(str(folder))
        self.fs = _WeightFiles()


class _WeightFiles(FileSystem):
    """File system in which a folder lists its files of weights alone."""

    def ls(self, path: str | os.PathLike) -> list[str]:
        """Return the paths of a folder's files of weights."""
        return list(map(str, _files(path)))


def _saved(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that a model saves, by name; tied ones have one name."""
    names = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if name in names}


def _files(folder: str | Path) -> list[Path]:
    """Return the safetensors files that transformers takes from a folder; none if there are none, or the index is damaged."""
    single, index = Path(folder) / "model.safetensors", Path(folder) / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    try:
        return sorted({Path(folder) / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _stored(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a folder's files of weights.

    There are none if a file is damaged or missing, holds codes instead of floats, or a tensor is there twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    tensor = file.get_slice(name)
                    if name in shapes or tensor.get_dtype() not in FLOATS:
                        return {}
                    shapes[name] = tuple(tensor.get_shape())
        except (SafetensorError, OSError):
            return {}
    return shapes
