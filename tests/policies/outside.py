"""An installed distribution that provides policies, like another package."""

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

HOOKS = '''
"""A policy from outside that overrides hooks of the base class, and calls those that it overrides."""

import functools
from dataclasses import dataclass, field, replace

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels.ops import PromptVotes, RetentionRule
from kvpop_vllm.policies import Policy
from kvpop_vllm.policies.base import GATED, ModelShape, Order, Signal

CALLS = []


def counted(name, hook):
    def call(self, *arguments):
        CALLS.append(name)
        return hook(self, *arguments)
    return call


@dataclass
class Hooks(Policy):
    name = "hooks"
    paper = "-"
    cost = "-"
    state = "32 x G x D float32"
    signals = frozenset({Signal.MASS})
    order = Order.STATIC
    compresses = True
    default_sinks, default_window = 2, 8
    default_correction, default_allocator, default_protect = "none", "pyramid", 0

    notes: list = field(default_factory=list)

    def __post_init__(self):
        self.notes.append("made")
        super().__post_init__()

    def prepare(self):
        assert isinstance(self.model, ModelShape) and not self.signals & GATED
        super().prepare()

    def check_retention(self, kept):
        super().check_retention(kept)
        if kept.window > 100:
            raise ConfigError("--kv-policy hooks takes a window of at most 100: lower --kv-window")

    def check_realised(self):
        super().check_realised()

    def check_ranks(self, ranks):
        if ranks > 2:
            raise ConfigError("--kv-policy hooks takes at most two ranks: lower --tensor-parallel-size")
        super().check_ranks(ranks)

    def scorer_shape(self):
        return super().scorer_shape()

    def shares(self):
        shares = super().shares()
        shares[:, 0] -= 1
        return shares

    def rule(self, layer, heads):
        rule = replace(self.training_free_rule(heads, None), compression=self.compression)
        assert isinstance(rule, RetentionRule)
        return rule

    def training_free_rule(self, heads, scorer, log_gamma=0.0):
        return super().training_free_rule(heads, scorer, log_gamma - 0.5)

    def layer_rule(self, layer, heads):
        return super().layer_rule(layer, heads)

    def retention_of(self, budget):
        return super().retention_of(budget)

    @property
    def compression(self):
        assert super().compression is None
        return PromptVotes(self.query_group)

    @property
    def protect(self):
        return True if super().protect == 0 else 0

    @property
    def allocator(self):
        return super().allocator

    @functools.cached_property
    def allocate(self):
        return super().allocate

    @property
    def shifted(self):
        return super().shifted

    @property
    def graph(self):
        return super().graph + "hooks"


for hook in "prepare check_retention check_realised check_ranks scorer_shape shares rule training_free_rule".split():
    setattr(Hooks, hook, counted(hook, vars(Hooks)[hook]))
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
