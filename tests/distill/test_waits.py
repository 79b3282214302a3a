"""A pass forward and backward leaves the host free: it runs on torch's meta device, whose tensors nobody can read.

What runs is what a GPU runs, but for the insides of kernels. Before the layers transformers looks once for several
sequences in a row, which waits for what came before.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from distill.dispatched import RefuseWaits
from distill.rows import Rows
from distill.train_tiny import LENGTH, RECIPES
from transformers import masking_utils

from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.trainer import Trainer
from kvpop_vllm.kernels import dispatch

META = torch.device("meta")
LISTWISE = {"listwise": 1.0, "lists": 4}
PASSES = {
    "boundary": RECIPES["frozen"],
    "listwise": dataclasses.replace(RECIPES["frozen"], boundary=0.0, **LISTWISE),
    "both, with the base": dataclasses.replace(RECIPES["base"], **LISTWISE),
}


def test_waits_are_refused():
    """Reading a number, finding elements and blocking copies, each as a step might have them."""
    x = torch.ones(3, device=META)
    for wait in (x.sum().item, lambda: x[x > 0], lambda: torch.tensor([1]).to(META), lambda: float(x[0])):
        with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), RefuseWaits():
            wait()
    with RefuseWaits():
        torch.tensor([1]).to(META, non_blocking=True)
        torch.tensor([1.0]).item()


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_does_not_wait_for_its_device(model, tmp_path, monkeypatch, name):
    recipe = PASSES[name]
    monkeypatch.setattr(dispatch, "select", lambda op, x: "triton" if op in dispatch.TRITON_DTYPES else "reference")
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    top = torch.ones(1, LENGTH, 8, device=META), torch.ones(1, LENGTH, 8, dtype=torch.long, device=META)
    trainer = Trainer(
        model, recipe, tmp_path, Rows(LENGTH), teacher=lambda *row: top, process=Process(device=META), quiet=True
    )
    with RefuseWaits():
        metrics = trainer.one_pass(0, 2)
    gradients = [parameter.grad for parameter in trainer.student.parameters() if parameter.requires_grad]
    assert all(gradient is not None for gradient in gradients) and metrics["loss"].device == META
