"""mLSTM scorer with delayed readout (KVpop sections E.3 to E.5)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import TokenScorer
from kvpop_vllm.schemas import FLAG, Rule, one_of
from kvpop_vllm.scorers.base import Dense, Scorer, headwise
from kvpop_vllm.scorers.scorer_config import POSITIVE, DecayedConfig

FORGET_BIAS = 4.0
"""Initial forget-gate bias: sigmoid(4) = 0.982 per token."""
FEATURE_MAPS = ("hedgehog", "softmax")
NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MLSTMConfig(DecayedConfig):
    """Config of an mLSTM scorer.

    Attributes:
        feature_map: "hedgehog" or "softmax".
        gate_softcap: c of ``c * tanh(a / c)`` on the gates, or None.
        norm: True if the memory's output is RMS-normalised.
        skip: True if the score has a skip connection from ``[k; v]``.
        delayed: True if a token is read out when it leaves the window.
    """

    scorer: ClassVar[str] = "mlstm"
    rules: ClassVar[dict[str, Rule]] = DecayedConfig.rules | {
        "feature_map": one_of(FEATURE_MAPS),
        "gate_softcap": (lambda cap: cap is None or POSITIVE[0](cap), f"null or {POSITIVE[1]}"),
        **{name: FLAG for name in ("norm", "skip", "delayed")},
    }

    feature_map: str = "hedgehog"
    gate_softcap: float | None = None
    norm: bool = False
    skip: bool = False
    delayed: bool = True

    @property
    def retention(self):
        """Retention settings: sinks, window, long-range slots, delay, trained budgets."""
        return replace(super().retention, delayed=self.delayed)

    def shapes(self, names=("v_proj",)):
        """Return the shapes of one layer's tensors. ``v_proj`` is optional. See :meth:`ScorerConfig.shapes`."""
        h, x = self.num_kv_heads, 2 * self.head_dim
        # without a projection the memory holds the token's value, of D channels
        width = "V" if "v_proj" in names else self.head_dim
        shapes = super().shapes() | {name: (h, x, "F") for name in ("q_proj", "k_proj")}
        for gate in ("igate", "fgate"):
            shapes |= {f"{gate}.weight": (h, x), f"{gate}.bias": (h,)}
        if "v_proj" in names:
            shapes["v_proj"] = (h, x, width)
        shapes |= {"out.weight": (h, width), "out.bias": (h,)}
        if self.norm:
            shapes["norm.weight"] = (h, width)
        if self.skip:
            shapes["skip.weight"] = (h, x)
        return shapes


@dataclass(frozen=True)
class MLSTMWeights(TokenScorer):
    """Delayed mLSTM scorer (KVpop E.3, E.4).

    The state of a head is the flat float32 array ``C [F, Dv], z [F], m [1]``.

    Attributes:
        q_proj, k_proj: ``[H, 2D, Fp]`` float32. The number of features F is ``2 Fp`` for ``hedgehog``, Fp for
            ``softmax``.
        v_proj: ``[H, 2D, Dv]`` float32, or None to use the token's value itself (Dv = D).
        igate_weight, fgate_weight: ``[H, 2D]`` float32.
        igate_bias, fgate_bias: ``[H]`` float32.
        out_weight: ``[H, Dv]`` float32.
        out_bias: ``[H]`` float32.
        norm_weight: ``[H, Dv]`` float32, or None for no norm.
        skip_weight: ``[H, 2D]`` float32, or None for no skip connection.
        feature_map: ``hedgehog`` or ``softmax``.
        gate_softcap: c of ``c * tanh(a / c)`` on gate pre-activations, or None.
        delayed: if True, token ``u = q - w`` is read out when it leaves the window. If False, token q is read
            out at its own insertion.
    """

    kernel: ClassVar[str] = "mlstm"
    recurrent: ClassVar[bool] = True

    q_proj: torch.Tensor
    k_proj: torch.Tensor
    igate_weight: torch.Tensor
    igate_bias: torch.Tensor
    fgate_weight: torch.Tensor
    fgate_bias: torch.Tensor
    out_weight: torch.Tensor
    out_bias: torch.Tensor
    v_proj: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    skip_weight: torch.Tensor | None = None
    feature_map: str = "hedgehog"
    gate_softcap: float | None = None
    delayed: bool = True

    @property
    def features(self) -> int:
        """Number of features F."""
        return self.q_proj.shape[-1] * (2 if self.feature_map == "hedgehog" else 1)

    @property
    def value_size(self) -> int:
        """Value width Dv."""
        return self.out_weight.shape[-1]

    @property
    def state_floats(self) -> int:
        """Number of float32 values in the state of one head."""
        return self.features * self.value_size + self.features + 1

    def options(self):
        if self.feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map must be one of {FEATURE_MAPS}, got {self.feature_map!r}")
        return {
            "hedgehog": self.feature_map == "hedgehog",
            "softcap": self.gate_softcap,
            "delayed": self.delayed,
        }

    def inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the inputs of the state update for x ``[..., H, S, 2D]`` (eqs. 37, 40).

        Returns:
            Write features ``[..., H, S, F]``, values ``[..., H, S, Dv]``, and the input and forget gate
                pre-activations ``[..., H, S]``.
        """
        key = self.phi(headwise(x, self.k_proj))
        # the second half of [k; v]
        value = x[..., x.shape[-1] // 2 :] if self.v_proj is None else headwise(x, self.v_proj)
        igate = self.softcap(headwise(x, self.igate_weight) + self.igate_bias.unsqueeze(-1))
        fgate = self.softcap(headwise(x, self.fgate_weight) + self.fgate_bias.unsqueeze(-1))
        return key, value, igate, fgate

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Return the read features ``[..., H, S, F]`` of the tokens x ``[..., H, S, 2D]`` to score (eq. 37)."""
        return self.phi(headwise(x, self.q_proj))

    def score(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return scores ``[..., H, S]`` for readouts ``h [..., H, S, Dv]`` of the tokens x (eq. 42).

        ``r = out . SiLU(norm(h)) + bias + skip . x``. Norm and skip are optional.
        """
        if self.norm_weight is not None:
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + NORM_EPS) * self.norm_weight.unsqueeze(-2)
        r = headwise(F.silu(h), self.out_weight) + self.out_bias.unsqueeze(-1)
        return r if self.skip_weight is None else r + headwise(x, self.skip_weight)

    def phi(self, a: torch.Tensor) -> torch.Tensor:
        """Return the features phi(a) over the last axis (KVpop appendix A).

        ``hedgehog`` is [softmax(a); softmax(-a)], ``softmax`` is softmax(a).
        """
        if self.feature_map == "hedgehog":
            return torch.cat([a.softmax(-1), (-a).softmax(-1)], dim=-1)
        return a.softmax(-1)

    def softcap(self, a: torch.Tensor) -> torch.Tensor:
        """Return ``c * tanh(a / c)``, or a if c is None."""
        cap = self.gate_softcap
        return a if cap is None else cap * torch.tanh(a / cap)


class MLSTMScorer(Scorer):
    """Delayed mLSTM scorer, initialised near identity.

    The q and k projections select key channels, the value projection selects value channels, and the forget
    gate is open. The readout is 0, so that before training all scores are equal and the policy is the sliding
    window.

    Args:
        features: columns of q_proj and k_proj, default D / 2 for hedgehog, D for softmax.
        value_size: Dv, default D.
        project_values: False uses the value itself (Dv = D).
    """

    config_class, weights_class = MLSTMConfig, MLSTMWeights
    weight_options = ("feature_map", "gate_softcap", "delayed")
    size_arguments = ("features", "value_size", "project_values")

    def __init__(
        self,
        config: MLSTMConfig,
        features: int | None = None,
        value_size: int | None = None,
        project_values: bool = True,
    ):
        super().__init__(config)
        h, d = config.num_kv_heads, config.head_dim
        columns = features or (d // 2 if config.feature_map == "hedgehog" else d)
        width = (value_size or d) if project_values else d
        self.q_proj = nn.Parameter(_near_identity(h, d, columns, of_values=False))
        self.k_proj = nn.Parameter(_near_identity(h, d, columns, of_values=False))
        self.v_proj = nn.Parameter(_near_identity(h, d, width, of_values=True)) if project_values else None
        # gates that read nothing yet: a state that takes all tokens in and forgets slowly
        self.igate = Dense(torch.zeros(h, 2 * d), torch.zeros(h))
        self.fgate = Dense(torch.zeros(h, 2 * d), torch.full((h,), FORGET_BIAS))
        self.out = Dense(torch.zeros(h, width), torch.zeros(h))
        self.norm = Dense(torch.ones(h, width)) if config.norm else None
        self.skip = Dense(torch.zeros(h, 2 * d)) if config.skip else None

    @classmethod
    def sizes(cls, tensors):
        """Return the size arguments of a module with these tensors."""
        return {
            "features": tensors["q_proj"].shape[-1],
            "value_size": tensors["out.weight"].shape[-1],
            "project_values": "v_proj" in tensors,
        }

    def forward(self, k, v, *, window):
        """Return raw scores ``[B, H, S]`` float32 of keys and values ``[B, H, S, D]``.

        Delayed scores are those of :meth:`Scorer.forward`.
        """
        weights, x = self.weights(), torch.cat([k, v], -1).float()
        key, value, igate, fgate = weights.inputs(x)
        delay = window if self.config.delayed else 0
        h, _ = ops.delayed_mlstm(weights.query(x), key, value, igate, fgate, delay=delay)
        return weights.score(h, x)


def _near_identity(heads: int, size: int, columns: int, *, of_values: bool) -> torch.Tensor:
    """Return ``[H, 2D, columns]``: column j selects channel j modulo D of its half, plus noise."""
    pick = F.one_hot(torch.arange(columns) % size, size).T.float()
    halves = [torch.zeros_like(pick), pick] if of_values else [pick, torch.zeros_like(pick)]
    base = torch.cat(halves)
    return base + torch.randn(heads, *base.shape) * 0.01
