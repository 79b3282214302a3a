"""A training step at the shape of a large model, under fake tensors and a fake process group, and the memory it takes.

Tensors lie on the CPU, and ops are those of a GPU. Run as a script, it prints the memory: in a process that had run other
tests, torch's tracker once counted 0.8 GB of activations too many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from kvpop_vllm.distill import losses
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.distill.recipes import PAPER
from kvpop_vllm.distill.run import OnlineTeacher
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.trainer import Trainer
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.model_hook import NAME, config_to_load

TRACKER_SEEN = "2.13."
"""Versions of torch in which the memory tracker, a private module, has been seen."""
DEVICE = torch.device("cpu")
"""Device of the tensors: a torch without CUDA has no autograd of fake tensors on a GPU."""
ATTENTION = "scaled_dot_product_attention"
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
}


def write_config(folder: Path, size: str, **changes) -> Path:
    """Write the config of Qwen3-8B or Qwen3-4B, or one with changes, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3 | SIZES[size] | changes))
    return folder


@contextlib.contextmanager
def fake_gpus(world: int):
    """Give the first of ``world`` processes; tensors that are made have no values, and ops are those of a GPU."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        process = Process(0, world, DEVICE, init_device_mesh(DEVICE.type, (world,)))
        of_gpu = {"select": _of_gpu, "_interpreted": lambda: True}
        with (
            mock.patch.multiple(dispatch, **of_gpu),
            mock.patch.object(F, ATTENTION, _flash),
            mock.patch.object(losses, "_positions", _drawn),
            FakeTensorMode(),
            _in_place(),
        ):
            yield process
    finally:
        dist.destroy_process_group()


def _of_gpu(op, tensor):
    return "triton" if op in dispatch.TRITON_DTYPES else "reference"


def _drawn(*args, draw=losses._positions):
    with unset_fake_temporarily():  # positions are numbers of the host
        return draw(*args)


def _flash(q, k, v, **options):
    return torch.empty_like(q)


def _in_place():
    """Leave modules where they are: fake parameters cannot be moved."""
    return mock.patch.object(torch.nn.Module, "to", lambda module, *args: module)


def _empty(folder, dtype):
    config = config_to_load(folder, logits=True)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    model.tie_weights()
    model.config.use_cache = False
    return model


class FakeTeacher(OnlineTeacher):
    @staticmethod
    def _load(model, dtype, sharded):
        return _empty(model, dtype)


class FakeRows:
    """Rows without values."""

    fingerprint = "none"

    def __init__(self, length):
        self.length = length

    def __getitem__(self, row):
        return torch.zeros(self.length, dtype=torch.long)


class FakeTrainer(Trainer):
    """Trainer whose weights have no values."""

    def _base(self, model, sharded):
        return _empty(model, torch.float32 if self.recipe.trains_base else getattr(torch, self.recipe.dtype))


def measured(folder: Path, out: Path, recipe: Recipe, world: int) -> dict[str, int]:
    """Return the bytes of a GPU by kind at the moment of a step in which it has most, as torch's tracker has them.

    The step has one micro-batch a process, whose gradients are added to others.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    recipe = dataclasses.replace(recipe, batch=world * recipe.micro_batch)
    with fake_gpus(world) as process:
        teacher = FakeTeacher(folder, recipe, process) if recipe.distils and recipe.kl > 0 else None
        trainer = FakeTrainer(folder, recipe, out, FakeRows(recipe.length), teacher=teacher, process=process)
        trained = [p for group in trainer.optimiser.param_groups for p in group["params"]]
        for p in trained:
            p.grad = torch.zeros_like(p)
        trainer.optimiser.step()  # makes its state; gradients stay, as those of earlier micro-batches
        if world > 1:
            tracker = FSDPMemTracker(trainer.student, trainer.optimiser)
            if teacher is not None:
                tracker.track_inputs(tuple(p.to_local() for p in teacher.parameters()))
        else:
            tracker = MemTracker()
            track, options = tracker._track_module_params_and_buffers, {"install_grad_hooks": False}
            tracker._track_module_params_and_buffers = lambda module, install_grad_hooks: track(module, **options)
            tracker.track_external(trainer.student, trainer.optimiser, *(p.grad for p in trained))
        with tracker:  # of the optimiser it would count tensors by which DTensor finds shapes
            trainer.backward(0)
        peak = tracker.get_tracker_snapshot("peak")
    return {str(getattr(kind, "value", kind)): count for kind, count in peak[DEVICE].items()}


if __name__ == "__main__":
    folder, out, gpus, changes = sys.argv[1:]
    recipe = dataclasses.replace(PAPER, **json.loads(changes))
    print("BYTES", json.dumps(measured(Path(folder), Path(out), recipe, int(gpus))))
