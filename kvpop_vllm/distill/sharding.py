"""Shards of a trained model over the processes of a run (FSDP2), and the reading of weights into them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from kvpop_vllm.model_hook import NAME, config_to_load, decoder_of
from kvpop_vllm.scorers.published_checkpoint import is_published


@dataclass(frozen=True)
class Process:
    """Training process in its group; a context manager that leaves the group at its end.

    Attributes:
        rank: rank of this process.
        world: number of processes.
        device: device of this process.
        group: mesh of all processes; None if this one is alone.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")
    group: DeviceMesh | None = None

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
        return cls(dist.get_rank(), world, device, init_device_mesh(device.type, (world,)))

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of all processes; one that is alone joins a group of its own."""
        if self.group is not None:
            return self.group
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return init_device_mesh(self.device.type, (1,))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Leave the group.

        After an error this does not wait, because other processes may be waiting for this one.
        """
        if not dist.is_initialized():
            return
        if kind is not None and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


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
        The model, or None if its safetensors files do not hold each parameter by its name and shape.

    Raises:
        ConfigError: as of ``load_model``, but for what is wrong with weights.
    """
    config = config_to_load(folder, logits)
    if is_published(folder):
        return None
    with _parameters_on_meta():
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
        except (ValueError, RuntimeError):
            return None
    model.tie_weights()
    model.config.use_cache = False
    shapes = _shapes(folder)
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return model if all(shapes.get(name) == shape for name, shape in parameters.items()) else None


def read_weights(model: nn.Module, folder: str | Path, device: torch.device) -> None:
    """Read the weights of a sharded model of :func:`empty_model`; a process reads its shards alone.

    Args:
        model: the model, after ``fully_shard`` of all that holds its parameters.
        folder: folder of the model.
        device: device of the shards.
    """
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a single process loads "non-collectively"
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that are made meanwhile on the meta device; buffers have their values."""
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the safetensors files of a folder; a damaged file has none."""
    shapes = {}
    for path in Path(folder).glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except SafetensorError:
            continue
    return shapes
