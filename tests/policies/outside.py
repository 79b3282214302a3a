"""An installed distribution that provides policies, like another package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROJECTION = '''
"""A policy from outside: scores are a random projection of the key."""

from dataclasses import dataclass

import torch

from kvpop_vllm.kernels.ops import TokenScorer
from kvpop_vllm.policies.base import Policy, Signal


@dataclass(frozen=True)
class DotProduct(TokenScorer):
    weight: torch.Tensor

    def scores(self, k, v):
        return (k.float() * self.weight.unsqueeze(-2)).sum(-1)


class Projection(Policy):
    name = "projection"
    paper = "-"
    cost = "one dot product of length D per head"
    signals = frozenset({Signal.KEY})
    default_sinks, window_share = 4, 0.25

    def weight(self, layer):
        """[H, D], of the whole model."""
        generator = torch.Generator().manual_seed(layer)
        return torch.randn(self.model.num_kv_heads, self.model.head_dim, generator=generator)

    def rule(self, layer, heads):
        return self.training_free_rule(heads, DotProduct(self.weight(layer)[heads]))
'''


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Make the packages installed in ``folder`` importable, and remove every trace of them at the end."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if name.startswith("outside"):
                del sys.modules[name]


def install(
    folder: Path,
    entry: str = "projection = outside_policies:Projection",
    name: str = "outside-policies",
    code: str = PROJECTION,
):
    """Install a distribution with ``entry`` in our entry-point group into ``folder``.

    ``folder`` must be on ``sys.path``.
    """
    module = entry.split("=")[1].split(":")[0].strip()
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvpop_vllm.policies]\n{entry}\n")
