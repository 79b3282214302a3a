"""Naive oracle: a whole tiny model, with dense attention under masks built query by query.

It defines the results of serving, prefill and training, and shares no code with them. It is slow on purpose,
and meant for a few layers and up to about a thousand tokens.

Shapes: ``S`` tokens, ``V`` vocabulary, ``H`` KV heads, ``G`` query heads per KV head, ``D`` head size, ``E``
hidden size.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from .oracle_policy import OraclePolicy


@dataclass(frozen=True, eq=False)
class OracleRun:
    """Result of :meth:`OracleModel.run`. Lists have one entry per layer.

    Attributes:
        logprobs: ``[S, V]``. Row ``t`` predicts token ``t + 1``.
        visible: bool ``[H, S, S]``. ``visible[layer][h, q]`` is the retained set at step ``q``.
        margins: see :class:`LayerDecisions`.
        scores: see :class:`LayerDecisions`.
        lost: see :class:`LayerDecisions`.
    """

    logprobs: torch.Tensor
    visible: list[torch.Tensor]
    margins: list[torch.Tensor]
    scores: list[torch.Tensor]
    lost: list[torch.Tensor]

    @property
    def top2_gap(self) -> torch.Tensor:
        """Log-probability of the best token minus that of the second best, ``[S]``."""
        best = self.logprobs.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]

    def retained(self, layer: int, head: int, q: int) -> list[int]:
        """Return the positions held after step ``q``, ascending."""
        return torch.nonzero(self.visible[layer][head, q]).flatten().tolist()


class OracleModel:
    """Forward pass of a Llama, Qwen2 or Qwen3 folder, written out in torch, in float32 or float64."""

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float64) -> None:
        """Read ``config.json`` and all safetensors of ``model_dir``, with weights cast to ``dtype``.

        Raises:
            ValueError: the model has a feature that this forward pass does not support.
        """
        self.config = json.loads((Path(model_dir) / "config.json").read_text())
        self.dtype = dtype
        self.weights: dict[str, torch.Tensor] = {}
        for path in sorted(Path(model_dir).glob("*.safetensors")):
            self.weights.update({name: t.to(dtype) for name, t in load_file(path).items()})
        _check_known(self.config)
        self.layers: int = self.config["num_hidden_layers"]
        self.q_heads: int = self.config["num_attention_heads"]
        self.kv_heads: int = self.config["num_key_value_heads"]
        default = self.config["hidden_size"] // self.q_heads
        self.head_dim: int = self.config.get("head_dim") or default

    @torch.no_grad()
    def run(
        self,
        token_ids: Sequence[int],
        policy: OraclePolicy | None = None,
        visible: Sequence[torch.Tensor] | None = None,
        bias: Sequence[tuple[int, int, int, float]] = (),
        cartridge: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = (),
    ) -> OracleRun:
        """Process a whole sequence, prompt and generated tokens alike.

        Args:
            token_ids: ``S`` token ids.
            policy: policy to apply. Everything is kept if omitted.
            visible: use these retained sets, bool ``[H, S, S]`` per layer, instead of the policy's own.
                Scores are still computed, and the margins then judge the given sets.
            bias: ``(layer, head, token, by)``: add ``by`` to the token's score when sets are made.
            cartridge: keys and values ``[H, P, D]`` and biases of logits ``[H, P]`` of each layer, which take the
                place of those of the first P tokens.
        """
        policy = policy or OraclePolicy.full()
        cos, sin = self._rope(len(token_ids))
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        run = OracleRun(torch.empty(0), [], [], [], [])
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{prefix}.input_layernorm")
            query, key, value, channel = self._qkv(normed, f"{prefix}.self_attn", cos, sin, policy.borrows)
            forced = None if visible is None else visible[layer]
            added = None
            if cartridge:
                (own_key, own_value, own_bias), slots = cartridge[layer], cartridge[layer][2].shape[1]
                # in place, since nothing else reads this layer's keys and values
                key[:, :slots], value[:, :slots] = own_key.to(key), own_value.to(key)
                added = torch.zeros(key.shape[:2], dtype=key.dtype)
                added[:, :slots] = own_bias.to(key)
            nudged = [(head, token, by) for bias_layer, head, token, by in bias if bias_layer == layer]
            decided = policy.decide(layer, query, key, value, forced, nudged, normed, channel, added)
            for collected, of_layer in zip(
                (run.visible, run.margins, run.scores, run.lost),
                (decided.visible, decided.margins, decided.scores, decided.lost),
                strict=True,
            ):
                collected.append(of_layer)
            mixed = policy.attend(query, key, value, run.visible[layer], added)
            hidden = hidden + self._linear(mixed, f"{prefix}.self_attn.o_proj")
            normed = self._norm(hidden, f"{prefix}.post_attention_layernorm")
            hidden = hidden + self._mlp(normed, f"{prefix}.mlp")
        logits = self._logits(self._norm(hidden, "model.norm"))
        return replace(run, logprobs=logits.log_softmax(-1))

    def greedy(self, token_ids: Sequence[int], n_new: int, policy: OraclePolicy | None = None) -> list[int]:
        """Return ``n_new`` greedy tokens.

        Everything is recomputed for each token, so this is for short tests only.
        """
        tokens = list(token_ids)
        for _ in range(n_new):
            tokens.append(int(self.run(tokens, policy).logprobs[-1].argmax()))
        return tokens[len(token_ids) :]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the RMS norm over the last axis."""
        mean_square = (x * x).mean(-1, keepdim=True)
        scaled = x / torch.sqrt(mean_square + self.config["rms_norm_eps"])
        return scaled * self.weights[f"{name}.weight"]

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate = self._linear(x, f"{name}.gate_proj")
        return self._linear(gate * torch.sigmoid(gate) * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        tied = self.config.get("tie_word_embeddings", False)
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return x @ self.weights[name].T

    def _qkv(
        self, x: torch.Tensor, name: str, cos: torch.Tensor, sin: torch.Tensor, borrow: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project ``x [S, E]`` to query, key, value and the channel that a gate may borrow.

        The channel is the last one of the first query head of each KV head, before RoPE. If it is borrowed,
        it is 0 in the query, before and after RoPE.

        Returns:
            Query ``[H * G, S, D]``, key and value ``[H, S, D]`` as cached, channel ``[H, S]``.
        """
        head_outputs, first = [], slice(None, None, self.q_heads // self.kv_heads)
        for part in "qkv":
            y = self._linear(x, f"{name}.{part}_proj")
            y = y.view(len(x), -1, self.head_dim).transpose(0, 1)
            if part != "v":
                if f"{name}.{part}_norm.weight" in self.weights:
                    y = self._norm(y, f"{name}.{part}_norm")
                if part == "q":
                    # before it is set to 0
                    channel, y = y[first, :, -1].clone(), y.clone()
                    y[first, :, -1] *= not borrow
                half = self.head_dim // 2
                turned = torch.cat([-y[..., half:], y[..., :half]], dim=-1)
                y = y * cos + turned * sin
            if part == "q":
                # again, since the rotation turns the partner into it
                y[first, :, -1] *= not borrow
            head_outputs.append(y)
        return head_outputs[0], head_outputs[1], head_outputs[2], channel

    def _rope(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary tables, cosine and sine ``[S, D]``.

        They are computed in float32, whatever the dtype, as transformers and vLLM do. The rounded table is
        therefore part of the model and not an error of its execution.
        """
        rope = self.config.get("rope_parameters") or {}
        theta = rope.get("rope_theta", self.config.get("rope_theta", 10000.0))
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        inverse = 1.0 / (theta**exponent)
        # in float32 too, before the sine
        angle = torch.arange(length, dtype=torch.float32)[:, None] * inverse
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)


def _check_known(config: dict) -> None:
    """Check that the oracle supports all features of a model.

    Raises:
        ValueError: it does not. The result would be wrong.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    conditions = {
        "model_type": config["model_type"] in ("llama", "qwen2", "qwen3"),
        "hidden_act": config.get("hidden_act", "silu") == "silu",
        "rope_type": rope.get("rope_type", rope.get("type", "default")) == "default",
        "use_sliding_window": not config.get("use_sliding_window", False),
    }
    unknown = [name for name, fine in conditions.items() if not fine]
    if unknown:
        raise ValueError(f"the oracle does not know this model's {', '.join(unknown)}")


def derived_budget(run32: OracleRun, run64: OracleRun) -> float:
    """Return the allowed log-probability error: the largest difference between the two runs.

    Both runs must use the float64 retained sets, so that they differ by rounding only. The float32 run must
    be made under :class:`DisturbedSums`. No factor is needed, because the largest of many disturbed numbers
    is stable.
    """
    _require_same_sets(run32, run64)
    return float((run32.logprobs.double() - run64.logprobs.double()).abs().max())


def derived_margin_bound(run32: OracleRun, run64: OracleRun) -> list[float]:
    """Return the :func:`margin_bound` of each layer for two runs as in :func:`derived_budget`."""
    _require_same_sets(run32, run64)
    return [margin_bound(low, high) for low, high in zip(run32.scores, run64.scores, strict=True)]


def margin_bound(low: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the decision margin below which a correct implementation may decide differently.

    A margin is a difference of two scores, so the bound is twice their largest error.

    Args:
        low: float32 raw scores of one layer, computed under :class:`DisturbedSums`.
        exact: the same in float64, NaN where there is none.
    """
    error = (low.double() - exact).abs()
    error = error[~error.isnan()]  # drops entries without a score, and those that are infinite in both
    return 2.0 * float(error.max()) if error.numel() else 0.0


def _require_same_sets(run32: OracleRun, run64: OracleRun) -> None:
    pairs = zip(run32.visible, run64.visible, strict=True)
    if not all(torch.equal(a, b) for a, b in pairs):
        raise ValueError("run both with the float64 retained sets: run(..., visible=run64.visible)")
