"""Rows for trainer tests: deterministic, resumable text with long-range structure, shared out by number."""

from __future__ import annotations

import torch


class Rows:
    """Rows of random text; row j repeats a few names of its own.

    Process r of n yields rows r, r + n, ...
    """

    def __init__(self, length: int, vocab: int = 256, rank: int = 0, world: int = 1):
        self.length, self.vocab, self.rank, self.world, self.drawn = length, vocab, rank, world, 0

    def __iter__(self):
        return self

    def __next__(self) -> torch.Tensor:
        g = torch.Generator().manual_seed(1000 + self.drawn * self.world + self.rank)
        self.drawn += 1
        text = torch.randint(0, self.vocab // 2, (self.length,), generator=g)
        names = torch.randint(self.vocab // 2, self.vocab, (4,), generator=g)
        often = torch.rand(self.length, generator=g) < 0.2
        return torch.where(often, names[torch.randint(0, 4, (self.length,), generator=g)], text)

    def state_dict(self) -> dict:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict) -> None:
        self.drawn = state["drawn"]


def teacher_of(model, top: int = 32):
    """Return the dense model itself as an online teacher."""
    from kvpop_vllm.distill.hook import Dense

    @torch.no_grad()
    def teacher(tokens, row):
        best = model(tokens, attend=Dense()).logits.topk(top)
        return best.values, best.indices

    return teacher
