"""Forward pass of a model with a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.scorers import Signals

if TYPE_CHECKING:
    from kvpop_vllm.hf.cache import KVpopCache


class Step:
    """Attention of all layers in one pass; an :class:`kvpop_vllm.distill.hook.Attend`.

    Attributes:
        cache: cache of the pass.
        positions: ``[R, L]`` int64, positions of the tokens; 0 for pads.
        starts: position of each row's first token in the pass, None if every row decodes one token.
        counts: number of tokens of each row; they are its last columns.
        length: L.
        recorded: True if the pass is recorded into a CUDA graph and not executed.
        attended: layers that have attended.
        over: True if the pass has ended.
    """

    def __init__(
        self,
        cache: KVpopCache,
        positions: torch.Tensor,
        starts: list[int] | None,
        counts: list[int],
        length: int,
        recorded: bool,
    ):
        self.cache, self.positions, self.starts, self.counts, self.length = cache, positions, starts, counts, length
        self.recorded = recorded
        self.over, self.attended = False, set()
        self._hidden: dict[int, torch.Tensor] = {}
        self._channel: dict[int, torch.Tensor] = {}

    def see(self, layer: int, hidden: torch.Tensor) -> None:
        """Store ``hidden [R, L, E]``, the input of the layer's attention block, for the gate."""
        if self.cache.policy.gated:
            self._hidden[layer] = hidden

    def see_channel(self, layer: int, channel: torch.Tensor) -> None:
        """Store ``channel [R, L, H]``, the query channel that the layer gives up, for the gate."""
        self._channel[layer] = channel

    @torch.compiler.disable  # the kernels cannot be compiled
    def __call__(self, layer, q, k, v, scale):
        """Return the layer's attention output; see :class:`kvpop_vllm.distill.hook.Attend`.

        Raises:
            RuntimeError: gradients are required.
            ConfigError: the layer attends twice in a pass.
        """
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise RuntimeError("no gradients go through a KVpopCache: call the model under torch.no_grad()")
        pages = self.cache.layer(layer, q, k, v, scale)
        gate_scores = self._gate_scores(layer, k, v)
        if layer in self.attended:
            raise ConfigError(
                "the model's layers attend more than once, and a KVpopCache has pages for one: choose another model"
            )
        self.attended.add(layer)
        if self.starts is None:
            batch = pages.decode(self.cache.protected)
        else:
            batch = pages.prefill(self.starts, self.counts, self.length, self.cache.protected)
        return pages.attend(q, k, v, batch, gate_scores)

    def _gate_scores(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        """Return the scores ``[R, L, H]`` of the layer's gate, or None without a gate."""
        gate = self.cache.gate(layer, k.device)
        hidden, channel = self._hidden.pop(layer, None), self._channel.pop(layer, None)
        return None if gate is None else gate(Signals(hidden, k.transpose(1, 2), v.transpose(1, 2), channel))
