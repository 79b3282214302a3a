"""Raw retention scores, token by token, by their definition, part of the naive oracle.

Shapes: ``H`` KV heads, ``S`` tokens, ``D`` head size, ``F`` feature columns, ``P`` features after the feature
map (``2F`` for Hedgehog, ``F`` for softmax), ``Dv`` value width of the memory.

This module must not import the code under test, nor be imported by it.
"""

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

    The contents are not checked, because that is the task of the package and not of the oracle.
    """
    folder = Path(folder)
    config = json.loads((folder / "kvpop_config.json").read_text())
    tensors = load_file(folder / "kvpop_scorer.safetensors")
    layers: list[dict] = [{} for _ in range(config["num_layers"])]
    for name, tensor in tensors.items():
        # tensors' own names may have dots
        _, index, short = name.split(".", 2)
        layers[int(index)][short] = tensor.to(torch.float64)
    return {"config": config, "layers": layers}


def log_gamma(scorer: dict, layer: int) -> list[float]:
    """Return ``log gamma`` of each head of one layer in float64 (KVpop, eq. 21)."""
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
    """Return ``r_t`` of every token of one layer, ``[H, S]`` in the dtype of ``keys``.

    Args:
        scorer: ``"recency"``, ``"key norm"`` or the result of :func:`read_scorer`.
        layer: layer index.
        keys: ``[H, S, D]`` as cached (after QK-norm and RoPE).
        values: ``[H, S, D]``.
        window: ``w``, the delay of a delayed readout.
        hidden: ``[S, E]``, input of the attention block, for gates.
        channel: ``[H, S]``, last channel of each KV head's first query, before RoPE, for gates.
        begins: first token that a recurrent scorer processes.

    Returns:
        Scores, NaN where undefined. A delayed readout has none for ``t > S - 1 - window``, a recurrent scorer
        none for ``t < begins``.
    """
    if scorer == RECENCY:
        positions = torch.arange(keys.shape[1], dtype=keys.dtype)
        return positions.expand(keys.shape[0], -1).clone()
    if scorer == KEY_NORM:
        norm = keys.double().square().sum(-1).sqrt()
        return -norm.float().to(keys.dtype)  # scores are stored in float32, so norms that are equal there tie
    config = scorer["config"]
    params = {name: t.to(keys.dtype) for name, t in scorer["layers"][layer].items()}
    if config["scorer"] == "trimkv":
        return _log_beta(params, config, hidden, keys, values)
    if config["scorer"] == "dms":
        return _keep_logit(params, config, hidden, channel)
    if config["scorer"] == "kvzap":
        return _predicted_importance(params, config, hidden)
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
    """Return TRIM-KV's gate, the log of ``beta = 1 / (1 + exp(-a))``, ``[H, S]``."""
    x = hidden
    if config["reads"] == "kv":
        # k_1, v_1, k_2, v_2, and so on
        pairs = [part[head] for head in range(len(keys)) for part in (keys, values)]
        x = torch.cat(pairs, dim=-1)
    if config["gated"]:
        a = x @ params["gate_proj.weight"].T
        inner = a / (1 + torch.exp(-a)) * (x @ params["up_proj.weight"].T)
        out = inner @ params["down_proj.weight"].T
    else:
        a = x @ params["linear1.weight"].T + params["linear1.bias"]
        last = "linear2.weight"
        if "linear3.weight" in params:
            a = a / (1 + torch.exp(-a)) @ params["linear2.weight"].T + params["linear2.bias"]
            last = "linear3.weight"
        out = a / (1 + torch.exp(-a)) @ params[last].T
    return -torch.log1p(torch.exp(-(out + params["bias"]))).T


def _keep_logit(params: dict, config: dict, hidden: torch.Tensor, channel: torch.Tensor | None) -> torch.Tensor:
    """Return DMS's negated eviction logit, ``[H, S]``, NaN for a last token whose successor would decide."""
    read = channel if config["reads"] == "query" else (hidden @ params["weight"].T).T
    score = -(config["scale"] * read + params["bias"][:, None])
    if config["shifted"]:
        # the next token's logit decides, and the last token has none
        score = torch.cat([score[:, 1:], torch.full_like(score[:, :1], math.nan)], dim=1)
    return score


def _predicted_importance(params: dict, config: dict, hidden: torch.Tensor) -> torch.Tensor:
    """Return KVzap's score, ``[H, S]``, with ``GELU(a) = a / 2 (1 + erf(a / sqrt 2))``."""
    if config["linear"]:
        return (hidden @ params["weight"].T + params["bias"]).T
    a = hidden @ params["fc1.weight"].T + params["fc1.bias"]
    inner = a / 2 * (1 + torch.erf(a / math.sqrt(2)))
    return (inner @ params["fc2.weight"].T + params["fc2.bias"]).T


def _headwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``w_h . x_t + b_h``: ``[H, S, N]``, ``[H, N]``, ``[H]`` -> ``[H, S]``."""
    return torch.einsum("hsn,hn->hs", x, weight) + bias[:, None]


def _mlp_scores(params: dict, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.einsum("hsn,hnm->hsm", x, params["fc1.weight"]) + params["fc1.bias"][:, None]
    hidden = hidden * torch.sigmoid(hidden)
    return _headwise(hidden, params["fc2.weight"], params["fc2.bias"])


def _features(kind: str, a: torch.Tensor) -> torch.Tensor:
    """Return the positive features of the last axis: ``[.., F] -> [.., P]``."""
    if kind == "softmax":
        return torch.softmax(a, dim=-1)
    if kind == "hedgehog":
        return torch.cat([torch.softmax(a, dim=-1), torch.softmax(-a, dim=-1)], dim=-1)
    raise ValueError(f"the oracle knows no feature map {kind!r}")


def _softcap(a: torch.Tensor, cap: float | None) -> torch.Tensor:
    return a if cap is None else cap * torch.tanh(a / cap)


def mlstm_inputs(params: dict, config: dict, x: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the inputs of the recurrence.

    They are ``q~, k~ [H, S, P]``, ``v~ [H, S, Dv]`` and ``log i, log f [H, S]``.
    """
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
    """Return the scores of the plain recurrence from token ``begins`` on (KVpop, eqs. 10 and 11).

    ``C [H, P, Dv]`` and ``z [H, P]`` are stored divided by ``exp(m)``, where ``m [H]`` is the running maximum
    of the log weights.
    """
    query, key, value, log_i, log_f = mlstm_inputs(params, config, x, values)
    heads, length, width = query.shape
    memory = x.new_zeros(heads, width, value.shape[-1])
    norm = x.new_zeros(heads, width)
    m = x.new_full((heads,), _START_STABILISER)
    states, delay = [], window if config["delayed"] else 0
    for q in range(begins, length):
        m_next = torch.maximum(log_f[:, q] + m, log_i[:, q])
        keep, add = torch.exp(log_f[:, q] + m - m_next), torch.exp(log_i[:, q] - m_next)
        m = m_next
        memory = keep[:, None, None] * memory
        memory = memory + add[:, None, None] * key[:, q, :, None] * value[:, q, None, :]
        norm = keep[:, None] * norm + add[:, None] * key[:, q]
        # the state after token q reads out token q - delay
        if q >= begins + delay:
            states.append((memory, norm, m))
    scores = x.new_full((heads, length), math.nan)
    if states:
        read = slice(begins, length - delay)
        memory, norm, m = map(torch.stack, zip(*states, strict=True))
        # the norm is stored divided by exp(m), and so is what is added to it
        epsilon = _EPSILON * torch.exp(-torch.clamp(m, -60.0, 60.0))
        read_queries, read_inputs = query[:, read].transpose(0, 1), x[:, read].transpose(0, 1)
        numerator = torch.einsum("uhp,uhpv->uhv", read_queries, memory)
        denominator = (read_queries * norm).sum(-1) + epsilon
        scores[:, read] = mlstm_head(params, numerator / denominator[..., None], read_inputs).T
    return scores


def mlstm_head(params: dict, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the scores of readouts, ``h [..., H, Dv]`` and ``x [..., H, 2D]`` -> ``[..., H]``.

    Optional parts apply if their tensor is present: RMS norm per head, skip connection from ``x``.
    """
    if "norm.weight" in params:
        h = h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-6) * params["norm.weight"]
    score = (params["out.weight"] * h * torch.sigmoid(h)).sum(-1) + params["out.bias"]
    if "skip.weight" in params:
        score = score + (params["skip.weight"] * x).sum(-1)
    return score
