"""Forward pass of a model with a cache."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.hook import GateInputs

if TYPE_CHECKING:
    from kvpop_vllm.hf.cache import KVpopCache


class Step(GateInputs):
    """Attention of all layers in one pass; an :class:`kvpop_vllm.distill.hook.Attend`.

    Args:
        cache: cache of the pass.
        positions: ``[R, L]`` int64, positions of the tokens; 0 for pads.
        starts: position of each row's first token in the pass, None if every row decodes one token.
        counts: number of tokens of each row; they are its last columns.
        recorded: True if the pass is recorded into a CUDA graph and not executed.

    Attributes:
        thread: thread of the pass.
        length: L.
    """

    def __init__(
        self,
        cache: KVpopCache,
        positions: torch.Tensor,
        starts: list[int] | None,
        counts: list[int],
        recorded: bool,
    ):
        super().__init__()
        self.cache, self.positions, self.starts, self.counts, self.recorded = cache, positions, starts, counts, recorded
        self.thread, self.length = threading.get_ident(), positions.shape[1]

    @torch.compiler.disable  # the kernels cannot be compiled
    def __call__(self, layer, q, k, v, scale):
        """Return the layer's attention output; see :class:`kvpop_vllm.distill.hook.Attend`.

        Raises:
            RuntimeError: gradients are required.
            ConfigError: the layer attends twice in a pass.
        """
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise RuntimeError("no gradients go through a KVpopCache: call the model under torch.no_grad()")
        cache, gate, signals = self.cache, self.cache.gates[layer], self.signals(layer, k, v)
        device = cache.device or q.device
        gate_scores = None if gate is None else gate.to(k.device)(signals).to(device)
        own, (q, k, v) = q.device, (x.to(device) for x in (q, k, v))
        pages = cache.layer(layer, q, k, v, scale)
        if layer in cache.attended:
            raise ConfigError(
                "the model's layers attend more than once, and a KVpopCache has pages for one: choose another model"
            )
        cache.attended.add(layer)
        if self.starts is None:
            batch = pages.decode(cache.protected)
        else:
            batch = pages.prefill(self.starts, self.counts, self.length, cache.protected)
        return pages.attend(q, k, v, batch, gate_scores).to(own)
