"""Training of gates: attention, and the loss of a row.

All methods give a gate what it reads in serving. TRIM-KV and DMS attend under soft evictions and differentiate through
the whole model after the gate, which is frozen unless asked otherwise. KVzap attends to all tokens and fits the gate to
targets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.distill.soft_evictions import after, by_age, soft_attention, soft_sizes
from kvpop_vllm.distill.sparse_attention import dense_attention
from kvpop_vllm.distill.targets import retention_target
from kvpop_vllm.model_hook import GateInputs
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import Signals

GateScores = Callable[[int, Signals], torch.Tensor]
"""Gate function: ``gate_scores(layer, signals of tokens [B, S]) -> [B, S, H]`` float32, the gate's scores."""


class _Gated(GateInputs):
    """Base class of an :class:`~kvpop_vllm.model_hook.Attend` that also receives the attention's input."""

    takes_sinks = True

    def __init__(self, gate_scores: GateScores):
        super().__init__()
        self.gate_scores = gate_scores

    def scores(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return gate scores ``[B, H, S]`` for k, v ``[B, H, S, D]``."""
        return self.gate_scores(layer, self.signals(layer, k, v)).transpose(1, 2)


class TrimKVAttend(_Gated):
    """Retention-gated attention and the capacity loss (TRIM-KV section 4, eqs. 3 to 6).

    Every token's attention weight has the factor ``beta_t^(q - t)``, which replaces its eviction. The loss
    pushes the sum of these factors below the capacity M. The paper divides by q, the authors' code by ``q -
    M``; this follows the paper. Sinks and window, which the paper does not have, are not used.

    Args:
        gate_scores: returns log beta.
        capacity: M in tokens per head.
        protected: number of tokens at the start that are never evicted, nor counted.

    Attributes:
        losses: layer -> its capacity loss.
    """

    def __init__(self, gate_scores: GateScores, capacity: int, protected: int = 0):
        super().__init__(gate_scores)
        self.capacity, self.protected = capacity, protected
        self.losses: dict[int, torch.Tensor] = {}

    def __call__(self, layer, q, k, v, scale, sink_logits=None):
        """Return the attention of one layer; see :class:`kvpop_vllm.model_hook.Attend`."""
        log_beta = self.scores(layer, k, v)[..., self.protected :]
        self.losses[layer] = capacity_loss(log_beta, self.capacity)
        return soft_attention(q, k, v, F.pad(log_beta, (self.protected, 0)), by_age, scale, sink_logits)

    def loss(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss over layers, and the values to report."""
        loss = torch.stack([self.losses[layer] for layer in sorted(self.losses)]).mean()
        return loss, {"capacity": loss.detach()}


def capacity_loss(log_beta: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return ``1/T sum_{t=1..T} 1/t max(0, sum_{i<=t} beta_i^(t-i) - M)``, mean over heads (TRIM-KV eq. 5).

    Args:
        log_beta: ``[B, H, S]``.
        capacity: M in tokens per head.
    """
    sizes = soft_sizes(log_beta, by_age)
    t = torch.arange(1, log_beta.shape[-1] + 1, device=log_beta.device)
    return ((sizes - capacity).clamp_min(0) / t).mean()


class DMSAttend(_Gated):
    """Attention under relaxed eviction decisions, and the compression loss (DMS section 3.2).

    ``alpha = sigmoid((logit + noise) / tau)`` with the noise of a binary Gumbel-softmax. A token's weight is
    ``1 - alpha`` once it has left the window. The loss is ``max(0, target - share of alpha > 1/2)``, a share
    of all tokens, heads and layers; its gradient is that of alpha itself (straight through). This follows the
    authors' code, which does not bound the cache: a budget caps it in serving only, by the logits. Sinks,
    which the paper does not have, are never evicted and not counted.

    Args:
        gate_scores: returns keep-logits, the negative of eviction logits.
        roles: sinks and window.
        target: share of tokens to evict.
        tau: temperature of the relaxed decisions.
        seed: seed of the row. The noise depends on it and on the layer, so that a layer that runs twice draws
            the same noise.
    """

    def __init__(self, gate_scores: GateScores, roles: Retention, target: float, tau: float, seed: int):
        super().__init__(gate_scores)
        self.roles, self.target, self.tau, self.seed = roles, target, tau, seed
        self.evicted: dict[int, torch.Tensor] = {}

    def __call__(self, layer, q, k, v, scale, sink_logits=None):
        """Return the attention of one layer; see :class:`kvpop_vllm.model_hook.Attend`."""
        keep = self.scores(layer, k, v)
        logit = (self._noise(layer, keep) - keep) / self.tau
        alpha, sinks = logit.sigmoid(), self.roles.sinks
        # the value of the decision with the gradient of alpha
        decided = (alpha > 0.5).to(alpha.dtype) - alpha.detach() + alpha
        self.evicted[layer] = decided[..., sinks:].mean()
        left = F.logsigmoid(-logit)  # log(1 - alpha)
        term = torch.cat([torch.zeros_like(left[..., :sinks]), left[..., sinks:]], -1)
        return soft_attention(q, k, v, term, after(self.roles.window), scale, sink_logits)

    def loss(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the compression loss, and the values to report."""
        evicted = torch.stack([self.evicted[layer] for layer in sorted(self.evicted)]).mean()
        return (self.target - evicted).clamp_min(0), {
            "evicted": evicted.detach(),
            "target": torch.full_like(evicted, self.target, dtype=torch.float64),
        }

    def _noise(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """Return the difference of two Gumbel variables, in the shape of ``like``."""
        generator = torch.Generator(device=like.device).manual_seed(self.seed * 1000 + layer)
        uniform = torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)
        return torch.special.logit(uniform, eps=1e-6)


class KVzapAttend(_Gated):
    """Dense attention, and the regression of gate scores on retention targets (KVzap section 3).

    The target of a token is the logarithm of the attention that it gets after it has left the window
    (:func:`kvpop_vllm.distill.targets.retention_target`). The loss is the mean squared error over the tokens that leave
    the window within the row, sinks excepted.

    Args:
        gate_scores: returns scores.
        roles: sinks and window.
        recipe: options of the targets.
    """

    def __init__(self, gate_scores: GateScores, roles: Retention, recipe: Recipe):
        super().__init__(gate_scores)
        self.roles, self.recipe = roles, recipe
        self.errors: dict[int, torch.Tensor] = {}
        self.variances: dict[int, torch.Tensor] = {}

    def __call__(self, layer, q, k, v, scale, sink_logits=None):
        """Return the attention of one layer; see :class:`kvpop_vllm.model_hook.Attend`."""
        recipe, sinks, window = self.recipe, self.roles.sinks, self.roles.window
        out, lse = dense_attention(q, k, v, scale, sink_logits)
        options = {name: getattr(recipe, name) for name in ("lookahead", "normalise", "groups")}
        leaving = slice(sinks, k.shape[2] - window)
        target = retention_target(q, k, lse, window=window, scale=scale, **options)[..., leaving]
        self.errors[layer] = (self.scores(layer, k, v)[..., leaving] - target).square().mean()
        self.variances[layer] = target.var(-1, correction=0).mean()
        return out

    def loss(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean loss over layers, and the share of the targets' variance that scores explain."""
        errors, variances = (
            torch.stack([values[layer] for layer in sorted(values)]) for values in (self.errors, self.variances)
        )
        return errors.mean(), {"explained": 1 - (errors.sum() / variances.sum()).detach()}


def eviction_target(step: int, steps: int, compression: float) -> float:
    """Return the share of tokens to evict at ``step`` of ``steps`` (DMS section 3.2).

    It is ``1 - 1 / CR``, with CR rising linearly from 1 to ``compression``.
    """
    ratio = 1 + (compression - 1) * min(1.0, step / max(1, steps - 1))
    return 1 - 1 / ratio
