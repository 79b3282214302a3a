"""Raw retention scores, token by token, as the definition says; part of the naive oracle.

Shapes: ``H`` KV heads, ``S`` tokens, ``D`` head size, ``F`` feature columns, ``P`` features after
the feature map (``2F`` for Hedgehog, ``F`` for softmax), ``Dv`` value width of the memory.

Nothing here may be imported by, or import, the code it judges.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

RECENCY, KEY_NORM = "recency", "key norm"
NEWEST_MASS, MEAN_MASS, MOMENT_RESIDUAL = "newest mass", "mean mass", "moment residual"
RANDOM_DRAW = "random draw"
PROMPT_VOTES = "prompt votes"
_EPSILON = 1e-6
_START_STABILISER = -1e30


def read_scorer(folder: str | Path) -> dict:
    """Read a scorer folder into ``{"config": dict, "layers": [{name: float64 tensor}, ...]}``.

    Trusts the folder: refusing malformed ones is the product's work, not the oracle's.
    """
    folder = Path(folder)
    config = json.loads((folder / "kvpop_config.json").read_text())
    tensors = load_file(folder / "kvpop_scorer.safetensors")
    layers: list[dict] = [{} for _ in range(config["num_layers"])]
    for name, tensor in tensors.items():
        _, index, short = name.split(".", 2)
        layers[int(index)][short] = tensor.to(torch.float64)
    return {"config": config, "layers": layers}


def log_gamma(scorer: dict, layer: int) -> list[float]:
    """Per-head ``log gamma`` of one layer in float64 (KVpop, eq. 21)."""
    decay = scorer["config"]["decay"]
    low, high = math.log(decay["min"]), math.log(decay["max"])
    logits = scorer["layers"][layer]["decay_logit"].tolist()
    return [low + (high - low) / (1.0 + math.exp(-alpha)) for alpha in logits]


def raw_scores(
    scorer: str | dict,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int,
    hidden: torch.Tensor | None = None,
    channel: torch.Tensor | None = None,
    begins: int = 0,
) -> torch.Tensor:
    """``r_t`` of every token of one layer, ``[H, S]`` in the dtype of ``keys``.

    Args:
        scorer: ``"recency"``, ``"key norm"`` or what :func:`read_scorer` returns.
        layer: layer index.
        keys: ``[H, S, D]`` as cached (after QK-norm and RoPE).
        values: ``[H, S, D]``.
        window: ``w``, the delay of a delayed readout.
        hidden: ``[S, E]``, what goes into attention. channel: ``[H, S]``, the last channel of each KV head's first query,
            before RoPE. For gates.
        begins: the first token that a recurrent scorer takes in.

    Returns:
        Scores; NaN where none exists (a delayed readout has none for ``t > S - 1 - window``, no recurrent scorer any for
        ``t < begins``).
    """
    if scorer == RECENCY:
        positions = torch.arange(keys.shape[1], dtype=keys.dtype)
        return positions.expand(keys.shape[0], -1).clone()
    if scorer == KEY_NORM:
        norm = keys.double().square().sum(-1).sqrt()
        return -norm.float().to(keys.dtype)  # score words are float32: norms that are one there tie
    config = scorer["config"]
    params = {name: t.to(keys.dtype) for name, t in scorer["layers"][layer].items()}
    if config["scorer"] == "trimkv":
        return _log_beta(params, config, hidden, keys, values)
    if config["scorer"] == "dms":
        return _keep_logit(params, config, hidden, channel)
    x = torch.cat([keys, values], dim=-1)
    if config["scorer"] == "linear":
        return _headwise(x, params["weight"], params["bias"])
    if config["scorer"] == "mlp":
        return _mlp_scores(params, x)
    if config["scorer"] == "mlstm":
        return _mlstm_scores(params, config, x, values, window, begins)
    raise ValueError(f"the oracle knows no scorer {config['scorer']!r}")


def _log_beta(
    params: dict, config: dict, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """TRIM-KV's gate: the log of ``beta = 1 / (1 + exp(-a))``, ``[H, S]``."""
    x = hidden
    if config["reads"] == "kv":
        pairs = [part[head] for head in range(len(keys)) for part in (keys, values)]
        x = torch.cat(pairs, dim=-1)
    if config["gated"]:
        a = x @ params["gate_proj.weight"].T
        inner = a / (1 + torch.exp(-a)) * (x @ params["up_proj.weight"].T)
        out = inner @ params["down_proj.weight"].T
    else:
        a = x @ params["linear1.weight"].T + params["linear1.bias"]
        out = a / (1 + torch.exp(-a)) @ params["linear2.weight"].T
    return -torch.log1p(torch.exp(-(out + params["bias"]))).T


def _keep_logit(params: dict, config: dict, hidden: torch.Tensor, channel: torch.Tensor | None) -> torch.Tensor:
    """DMS's eviction logit, negated, ``[H, S]``; NaN for a last token whose successor would decide."""
    read = channel if config["reads"] == "query" else (hidden @ params["weight"].T).T
    score = -(config["scale"] * read + params["bias"][:, None])
    if config["shifted"]:
        score = torch.cat([score[:, 1:], torch.full_like(score[:, :1], math.nan)], dim=1)
    return score


def _headwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``w_h . x_t + b_h``: ``[H, S, N]``, ``[H, N]``, ``[H]`` -> ``[H, S]``."""
    return torch.einsum("hsn,hn->hs", x, weight) + bias[:, None]


def _mlp_scores(params: dict, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.einsum("hsn,hnm->hsm", x, params["fc1.weight"]) + params["fc1.bias"][:, None]
    hidden = hidden * torch.sigmoid(hidden)
    return _headwise(hidden, params["fc2.weight"], params["fc2.bias"])


def _features(kind: str, a: torch.Tensor) -> torch.Tensor:
    """Positive feature map over the last axis: ``[.., F] -> [.., P]``."""
    if kind == "softmax":
        return torch.softmax(a, dim=-1)
    if kind == "hedgehog":
        return torch.cat([torch.softmax(a, dim=-1), torch.softmax(-a, dim=-1)], dim=-1)
    raise ValueError(f"the oracle knows no feature map {kind!r}")


def _softcap(a: torch.Tensor, cap: float | None) -> torch.Tensor:
    return a if cap is None else cap * torch.tanh(a / cap)


def mlstm_inputs(params: dict, config: dict, x: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the recurrence consumes: ``q~, k~ [H, S, P]``, ``v~ [H, S, Dv]``, ``log i, log f [H, S]``."""
    kind, cap = config["feature_map"], config["gate_softcap"]
    query = _features(kind, torch.einsum("hsn,hnf->hsf", x, params["q_proj"]))
    key = _features(kind, torch.einsum("hsn,hnf->hsf", x, params["k_proj"]))
    value = values
    if "v_proj" in params:
        value = torch.einsum("hsn,hnf->hsf", x, params["v_proj"])
    log_i = _softcap(_headwise(x, params["igate.weight"], params["igate.bias"]), cap)
    forget = _softcap(_headwise(x, params["fgate.weight"], params["fgate.bias"]), cap)
    return query, key, value, log_i, torch.nn.functional.logsigmoid(forget)


def _mlstm_scores(
    params: dict, config: dict, x: torch.Tensor, values: torch.Tensor, window: int, begins: int
) -> torch.Tensor:
    """Plain recurrence, one token after the other from token ``begins`` on (KVpop, eqs. 10 and 11).

    ``C [H, P, Dv]`` and ``z [H, P]`` are kept divided by ``exp(m)``, ``m [H]`` being the running
    maximum of the log weights.
    """
    query, key, value, log_i, log_f = mlstm_inputs(params, config, x, values)
    heads, length, width = query.shape
    memory = x.new_zeros(heads, width, value.shape[-1])
    norm = x.new_zeros(heads, width)
    m = x.new_full((heads,), _START_STABILISER)
    scores = x.new_full((heads, length), math.nan)
    delay = window if config["delayed"] else 0
    for q in range(begins, length):
        m_next = torch.maximum(log_f[:, q] + m, log_i[:, q])
        keep, add = torch.exp(log_f[:, q] + m - m_next), torch.exp(log_i[:, q] - m_next)
        m = m_next
        memory = keep[:, None, None] * memory
        memory = memory + add[:, None, None] * key[:, q, :, None] * value[:, q, None, :]
        norm = keep[:, None] * norm + add[:, None] * key[:, q]
        u = q - delay
        if u < begins:
            continue
        epsilon = _EPSILON * torch.exp(-torch.clamp(m, -60.0, 60.0))
        numerator = torch.einsum("hp,hpv->hv", query[:, u], memory)
        denominator = (query[:, u] * norm).sum(-1) + epsilon
        scores[:, u] = mlstm_head(params, numerator / denominator[:, None], x[:, u])
    return scores


def mlstm_head(params: dict, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Score of one readout, ``h [H, Dv]`` and ``x [H, 2D]`` -> ``[H]``.

    Optional parts act when their tensor is present: RMS norm per head, skip from ``x``.
    """
    if "norm.weight" in params:
        h = h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-6) * params["norm.weight"]
    score = (params["out.weight"] * h * torch.sigmoid(h)).sum(-1) + params["out.bias"]
    if "skip.weight" in params:
        score = score + (params["skip.weight"] * x).sum(-1)
    return score
