"""Base classes of the modules of scorer files: scorers of keys and values, and gates."""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from kvpop_vllm.kernels.ops import TokenScorer
from kvpop_vllm.scorers.scorer_config import Decay, ScorerConfig


def log_gamma(decay_logit: torch.Tensor, decay: Decay) -> torch.Tensor:
    """Return ``log gamma_h = log g_min + sigmoid(alpha_h) (log g_max - log g_min)``.

    Args:
        decay_logit: ``[H]``, alpha.
        decay: range of gamma.

    Returns:
        ``[H]`` float64.
    """
    low, high = math.log(decay.min), math.log(decay.max)
    return low + torch.sigmoid(decay_logit.double()) * (high - low)


def headwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply ``x [..., H, S, I]`` by one weight per head.

    Args:
        x: inputs.
        weight: vectors ``[H, I]`` or matrices ``[H, I, O]``.

    Returns:
        ``[..., H, S]`` for vectors, ``[..., H, S, O]`` for matrices.
    """
    if weight.dim() == 2:
        # [H, I, 1], so that each head multiplies by its own vector
        return (x @ weight.unsqueeze(-1)).squeeze(-1)
    return x @ weight


class Dense(nn.Module):
    """Weight and bias whose names in the file format share a prefix.

    Args:
        weight: initial weight.
        bias: initial bias, or None for none.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


class LayerModule(nn.Module):
    """Scorer or gate of one layer. Parameters have the names and shapes of the file format.

    Attributes:
        config_class: config of the kind.
        size_arguments: arguments of the constructor that set sizes of tensors.
        config: config of the scorer folder.
    """

    config_class: ClassVar[type[ScorerConfig]]
    size_arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ScorerConfig):
        super().__init__()
        self.config = config

    @classmethod
    def sizes(cls, tensors: dict[str, torch.Tensor]) -> dict:
        """Return the size arguments of a module that holds one layer's ``tensors``."""
        return {}


class Scorer(LayerModule):
    """Importance scorer of one layer from keys and values.

    The head axis of all parameters comes first. Subclasses implement :meth:`forward` unless the score of a
    token depends on its own key and value alone.

    Attributes:
        weights_class: what the kernels take. Its tensors have the names of the parameters, ``_`` for a dot.
        weight_options: keys of the config that it takes as well.
    """

    weights_class: ClassVar[type[TokenScorer]]
    weight_options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ScorerConfig):
        super().__init__(config)
        self.decay_logit = nn.Parameter(torch.zeros(config.num_kv_heads))

    def log_gamma(self) -> torch.Tensor:
        """Return the logarithm of the decay of each head, ``[H]`` float64."""
        return log_gamma(self.decay_logit, self.config.decay)

    def weights(self) -> TokenScorer:
        """Return the parameters as the kernels take them, without copies. Gradients flow through."""
        # a name with a dot cannot be that of an argument
        parameters = {name.replace(".", "_"): p for name, p in self.named_parameters() if name != "decay_logit"}
        return self.weights_class(**parameters, **{name: getattr(self.config, name) for name in self.weight_options})

    def forward(self, k: torch.Tensor, v: torch.Tensor, *, window: int) -> torch.Tensor:
        """Return the raw scores of all tokens of whole sequences.

        Args:
            k: keys ``[B, H, S, D]``, as cached.
            v: values ``[B, H, S, D]``.
            window: w, the delay of a delayed scorer.

        Returns:
            ``[B, H, S]`` float32. A delayed score of a token that has not left the window by ``S - 1`` is
            undefined, and is never ranked.
        """
        return self.weights().scores(k, v)


class Signals(NamedTuple):
    """Inputs of a layer's gate for tokens ``[..]``. Inputs that the gate does not read may be None.

    Attributes:
        hidden: ``[.., E]``, the attention block's input, after its norm.
        k: ``[.., H, D]``, keys as cached, of all KV heads.
        v: ``[.., H, D]``, values as cached, of all KV heads.
        channel: ``[.., H]``, last channel of the first query head of each KV head, after QK-norm and before
            RoPE.
    """

    hidden: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    channel: torch.Tensor | None = None


class Gate(LayerModule):
    """Gate of one layer: scores a token once, at insertion, from signals that no attention backend sees.

    Training and serving share it. It computes in float32, whatever the model's dtype. It does not depend on
    sequences: all axes before the last are token axes. Its output is the token's gate score
    (:class:`kvpop_vllm.kernels.ops.GateScore`).

    Attributes:
        borrows: True if the gate reads a channel of the queries, which must then be 0 before and after RoPE.
    """

    def __init__(self, config: ScorerConfig):
        super().__init__(config)
        self.borrows = config.reads == "query"

    def forward(self, signals: Signals) -> torch.Tensor:
        """Return the scores ``[.., H]`` float32 of tokens ``[..]``."""
        raise NotImplementedError(f"{type(self).__name__} has no forward()")
