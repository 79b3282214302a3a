"""Rows for trainer tests: deterministic text with long-range structure."""

from __future__ import annotations

import torch


class Rows:
    """Rows of random text; row j repeats a few names of its own."""

    fingerprint = "random text"

    def __init__(self, length: int, vocab: int = 256, first: int = 1000):
        self.length, self.vocab, self.first = length, vocab, first

    def in_other_order(self):
        return Rows(self.length, self.vocab, 2000)

    def __getitem__(self, row: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(self.first + row)
        text = torch.randint(0, self.vocab // 2, (self.length,), generator=g)
        names = torch.randint(self.vocab // 2, self.vocab, (4,), generator=g)
        often = torch.rand(self.length, generator=g) < 0.2
        return torch.where(often, names[torch.randint(0, 4, (self.length,), generator=g)], text)


def noisy_student(model, recipe):
    """Return a model of two layers with scorers that rank tokens at random."""
    from kvpop_vllm.distill.student import Student
    from kvpop_vllm.model_hook import load_model
    from kvpop_vllm.model_shape import folder_sizes
    from kvpop_vllm.scorers import build, make_config

    torch.manual_seed(3)
    config = make_config(folder_sizes(model), source="the test", **recipe.scorer_options())
    student = Student(load_model(model, torch.float32), [build(config) for _ in range(2)], recipe)
    with torch.no_grad():
        for name, p in student.scorers.named_parameters():
            p.add_(torch.randn_like(p) * (0 if name.endswith("decay_logit") else 0.3))
    return student


def teacher_of(model, top: int = 32):
    """Return the dense model itself as an online teacher."""
    from kvpop_vllm.model_hook import Dense

    @torch.no_grad()
    def teacher(tokens, row):
        best = model(tokens, attend=Dense()).logits.topk(top)
        return best.values, best.indices

    return teacher
