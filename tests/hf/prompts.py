"""Prompts, batches of them, and what ``generate()`` makes of these."""

from __future__ import annotations

import torch


def distinct(length: int) -> list[int]:
    """Tokens none of which comes twice: in a first layer equal ones would have equal key norms and logits of gates."""
    return torch.randperm(256, generator=torch.Generator().manual_seed(length))[:length].tolist()


def padded(prompts):
    """``input_ids`` and ``attention_mask`` of rows padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, cache, prompts, new=8, **options):
    """Greedy tokens of each row."""
    inputs = padded(prompts)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)
    return out[:, inputs["input_ids"].shape[1] :].tolist()
