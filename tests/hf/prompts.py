"""Prompts, padded batches, and greedy generation."""

import torch

from kvpop_vllm.model_hook import CACHE_NAME


def distinct(length: int) -> list[int]:
    """Return tokens without repeats, since equal tokens of a first layer have equal norms and gate scores."""
    return torch.randperm(256, generator=torch.Generator().manual_seed(length))[:length].tolist()


def padded(prompts):
    """Return ``input_ids`` and ``attention_mask`` of rows padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, cache, prompts, new=8, **options):
    """Return the greedy tokens of each row. Without a cache, those of the model's own."""
    inputs = padded(prompts) | ({} if cache is None else {CACHE_NAME: cache})
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False, **options)
    return out[:, inputs["input_ids"].shape[1] :].tolist()
