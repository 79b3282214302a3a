"""Base classes of learned policies: they load the scorer.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import functools
from dataclasses import dataclass, field, replace

import torch

from kvpop_vllm.config import ConfigError, ScorerShape
from kvpop_vllm.kernels.ops import GateScore
from kvpop_vllm.policies.allocators import CALIBRATED, Proportional
from kvpop_vllm.policies.base import Policy
from kvpop_vllm.scorers import Gate, Scorer, ScorerConfig, from_tensors
from kvpop_vllm.scorers.checkpoint import check_model, read_scorer

MEASURED = "the scorer's shares"
"""Name of the allocator of a scorer that has measured shares, in logs and records."""


@dataclass
class Learned(Policy):
    """Policy whose raw scores come from a scorer folder or from the model's own checkpoint.

    Attributes:
        checkpoint: scorer config of a full checkpoint. Its tensors are loaded with the model's weights.
        config: scorer config in use.
    """

    checkpoint: ScorerConfig | None = None
    config: ScorerConfig = field(init=False)

    def prepare(self):
        if self.settings.scorer is not None:
            source = self.settings.scorer
            self.config, self._layers = read_scorer(source, self.settings.map)
        elif self.settings.map is not None:
            raise ConfigError("--kv-map is for full checkpoints of other authors, and the model is none: leave it out")
        elif self.checkpoint is not None:
            source = "the checkpoint's kvpop section"
            # vLLM's loader brings the tensors later, layer by layer
            self.config, self._layers = self.checkpoint, [{} for _ in range(self.checkpoint.num_layers)]
        else:
            raise ConfigError(
                f"--kv-policy {self.name} needs a scorer: give --kv-scorer DIR (untrained ones come from 'kvpop init-scorer MODEL DIR')"
            )
        if self.config.scorer != self.scorer_kind:
            raise ConfigError(
                f"--kv-policy {self.name} needs a scorer of kind {self.scorer_kind!r}, {source} holds {self.config.scorer!r}: use --kv-policy {self._policy_of(self.config.scorer)}"
            )
        check_model(self.config, **vars(self.model), source=source)

    @staticmethod
    def _policy_of(kind: str) -> str:
        return next(cls.name for cls in _subclasses(Learned) if cls.scorer_kind == kind)

    @property
    def allocator(self):
        # a calibration's shares come before the scorer's
        measured = self.settings.allocator is None and super().allocator != CALIBRATED and self.config.shares
        return MEASURED if measured else super().allocator

    @functools.cached_property
    def allocate(self):
        if self.allocator == MEASURED:
            return Proportional(tuple(map(tuple, self.config.shares)))
        return super().allocate

    def scorer_shape(self) -> ScorerShape:
        return self.config.retention

    def set_tensors(self, layer: int, tensors: dict[str, torch.Tensor]) -> None:
        """Set the tensors of one layer from a full checkpoint: already checked, all heads, float32."""
        self._layers[layer] = tensors

    def loaded(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the tensors of one layer, all heads."""
        # prepare() left {} for tensors that the loader brings
        if not self._layers[layer]:
            raise ConfigError(
                f"the checkpoint's weights brought no scorer tensors for layer {layer} (dummy weights bring none): give --kv-scorer DIR"
            )
        return self._layers[layer]

    def module(self, layer: int, heads: slice) -> Scorer | Gate:
        """Return the scorer or gate of ``layer`` for ``heads``."""
        return from_tensors(self.config, self.config.of_heads(self.loaded(layer), heads))


class Gated(Learned):
    """Learned policy whose scores come from a gate.

    With a threshold the window must hold at least two tokens: the position word of slot 1 stores the number of filled
    slots, so that it must not be long-range.
    """

    def check_retention(self, retention):
        if self.drops_early and retention.window < 2:
            raise ConfigError(f"--kv-policy {self.name} needs a window of two tokens: set --kv-window to at least 2")

    def check_ranks(self, ranks):
        super().check_ranks(ranks)
        if self.config.reads == "kv" and ranks > 1:
            raise ConfigError(
                f"--kv-policy {self.name} reads the keys and values of all heads: set --tensor-parallel-size 1"
            )
        if self.config.reads == "query" and ranks > self.model.num_kv_heads:
            raise ConfigError(
                f"--kv-policy {self.name} borrows a channel of each KV head's first query head: set --tensor-parallel-size to at most"
                f" {self.model.num_kv_heads}"
            )

    def gate(self, layer, heads):
        return self.module(layer, heads)

    def rule(self, layer, heads):
        # the gate runs in the model, so that the rule needs no tensors of the scorer
        return self.training_free_rule(heads, GateScore(threshold=self.threshold))

    @property
    def graph(self):
        shapes = {name: tuple(tensor.shape) for name, tensor in sorted(self.loaded(0).items())}
        # budgets do not change what is compiled
        return f"{replace(self.config, sinks=0, window=1, topk=0, trained=(), shares=())} {shapes}"


def _subclasses(cls: type) -> list[type]:
    """Return all subclasses of a class, those of its subclasses included."""
    return [below for subclass in cls.__subclasses__() for below in (subclass, *_subclasses(subclass))]
