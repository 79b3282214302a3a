"""Tiny random models and scorers for tests, written without transformers.

A model with the default initialisation of its library attends almost evenly and repeats its last token, so
that any cache passes a test on it. The weights of these models are scaled so that attention is selective and
the output depends on tokens far back. :func:`require_distant_influence` checks this.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from .oracle import OracleModel

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# standard deviations of the outputs of projections, for inputs with unit mean square
_QK_SPREAD, _V_SPREAD, _O_SPREAD, _MLP_SPREAD, _LOGIT_SPREAD = 1.3, 1.0, 1.5, 0.7, 2.0


def write_tiny_model(
    folder: str | Path,
    kind: str = "llama",
    *,
    layers: int = 2,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 64,
    vocab: int = 256,
    max_position: int = 4096,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a loadable Hugging Face folder without a tokenizer, and return its path.

    ``kind`` is ``"llama"``, ``"qwen2"`` (with q/k/v bias) or ``"qwen3"`` (with QK-norm). ``q_heads *
    head_dim`` may differ from ``hidden`` except for Qwen2.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "attention_bias": kind == "qwen2",
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = _model_weights(config, torch.Generator().manual_seed(seed))
    weights = {name: t.to(dtype).contiguous() for name, t in weights.items()}
    # as transformers writes it
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_smollm3(folder: str | Path, **options) -> Path:
    """Write a SmolLM3 of four layers, the last of which does not rotate, as :func:`write_tiny_model` does.

    That is SmolLM3's default, and ``config.json`` does not say it.
    """
    folder = write_tiny_model(folder, **{"layers": 4} | options)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _model_weights(config: dict, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random weights under their Hugging Face names, float32."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        # in the order of the calls, so that a new tensor changes the draws of all later ones
        return std * torch.randn(*shape, generator=generator)

    weights = {
        "model.embed_tokens.weight": normal(vocab, hidden),
        "model.norm.weight": 1.0 + normal(hidden, std=0.1),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(vocab, hidden, std=_LOGIT_SPREAD / math.sqrt(hidden))
    for layer in range(config["num_hidden_layers"]):
        for name, tensor in _layer_weights(config, normal).items():
            weights[f"model.layers.{layer}.{name}"] = tensor
    return weights


def _layer_weights(config: dict, normal: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (wide, hidden, _QK_SPREAD),
        "self_attn.k_proj": (narrow, hidden, _QK_SPREAD),
        "self_attn.v_proj": (narrow, hidden, _V_SPREAD),
        "self_attn.o_proj": (hidden, wide, _O_SPREAD),
        "mlp.gate_proj": (inner, hidden, _MLP_SPREAD),
        "mlp.up_proj": (inner, hidden, _MLP_SPREAD),
        "mlp.down_proj": (hidden, inner, _MLP_SPREAD),
    }
    weights = {
        f"{name}.weight": normal(rows, columns, std=spread / math.sqrt(columns))
        for name, (rows, columns, spread) in shapes.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.weight"] = 1.0 + normal(hidden, std=0.1)
    for part, rows in (("q", wide), ("k", narrow), ("v", narrow)):
        if config["model_type"] == "qwen2":
            weights[f"self_attn.{part}_proj.bias"] = normal(rows, std=0.3)
        if config["model_type"] == "qwen3" and part != "v":
            # a norm takes the spread of its projection away, so that its weight gives it
            weights[f"self_attn.{part}_norm.weight"] = _QK_SPREAD * (1 + normal(dim, std=0.1))
    return weights


_KEYS = {
    "mlstm": {"feature_map": "hedgehog", "gate_softcap": None, "norm": False, "skip": False, "delayed": True},
    "trimkv": {"reads": "hidden", "gated": False},
    "dms": {"reads": "hidden", "scale": 3.0, "shifted": False},
    "kvzap": {"reads": "hidden", "linear": False},
}
"""Config keys of a kind of scorer, with the defaults of :func:`write_random_scorer`."""


def write_random_scorer(
    folder: str | Path,
    model_dir: str | Path,
    scorer: str = "mlstm",
    *,
    seed: int = 0,
    v_proj: bool = True,
    features: int | None = None,
    value_width: int | None = None,
    mlp_width: int = 16,
    hidden_layers: int = 1,
    evict: float = 0.0,
    layers: Sequence[int] = (),
    **options,
) -> Path:
    """Write a scorer folder whose scores vary strongly between tokens, and return its path.

    The format is version 1. Options that do not apply to ``scorer`` are ignored.

    Args:
        folder: folder to write.
        model_dir: folder of the model.
        scorer: mlstm, mlp, linear, trimkv, dms or kvzap.
        seed: seed of the random weights.
        v_proj: False leaves the value projection out.
        features: F, default D / 2 for Hedgehog, D for softmax.
        value_width: Dv, default D. Ignored without ``v_proj``.
        mlp_width: M of mlp, trimkv and kvzap.
        hidden_layers: hidden layers of trimkv's gate, 2 for that of DBTrimKV.
        evict: shift of the eviction logits of dms.
        layers: indices in the model of the layers that the scorer is for, if these are not all.
        options: of the config, see :func:`_scorer_config`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads((Path(model_dir) / "config.json").read_text())
    # keys of a JSON object are text
    by_layer = {int(layer): keys for layer, keys in (model.get("per_layer_config") or {}).items()}
    config = _scorer_config(model | (by_layer.get(layers[0], {}) if layers else {}), scorer, layers, **options)
    (folder / "kvpop_config.json").write_text(json.dumps(config, indent=2) + "\n")
    dim = config["head_dim"]
    sizes = {"M": mlp_width, "evict": evict, "hidden_layers": hidden_layers}
    sizes["F"] = features or (dim // 2 if config.get("feature_map") == "hedgehog" else dim)
    sizes["Dv"] = (value_width or dim) if v_proj else dim
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_layers"]):
        tensors = _scorer_weights(config, sizes, v_proj, generator)
        weights |= {f"layers.{layer}.{name}": t.contiguous() for name, t in tensors.items()}
    save_file(weights, folder / "kvpop_scorer.safetensors")
    return folder


def _scorer_config(
    model: dict,
    scorer: str,
    layers: Sequence[int],
    *,
    sinks: int = 4,
    window: int = 16,
    topk: int = 44,
    trained: Sequence[tuple[int, int]] = (),
    decay_step: int = 1,
    decay_min: float = 0.99,
    decay_max: float = 0.9999,
    **keys,
) -> dict:
    """Return the config of a random scorer.

    Args:
        model: config of the model.
        scorer: as in :func:`write_random_scorer`.
        layers: as in :func:`write_random_scorer`.
        sinks: s.
        window: w.
        topk: k.
        trained: (window, topk) of all trained budgets.
        decay_step: ``step`` of the decay.
        decay_min: ``min`` of the decay.
        decay_max: ``max`` of the decay.
        keys: those of :data:`_KEYS`, of any kind.

    Raises:
        TypeError: no kind has such a key.
    """
    if unknown := keys.keys() - set().union(*_KEYS.values()):
        raise TypeError(f"no scorer has {', '.join(sorted(unknown))}")
    config = {
        "format": "kvpop-scorer",
        "version": 1,
        "model_type": model["model_type"],
        "num_layers": len(layers) or model["num_hidden_layers"],
        "num_kv_heads": model["num_key_value_heads"],
        "head_dim": model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"],
        "scorer": scorer,
        "sinks": sinks,
        "window": window,
        **({"trained": [{"window": w, "topk": k} for w, k in trained]} if trained else {}),
        "topk": topk,
        **({"layers": list(layers)} if layers else {}),
        **{key: keys.get(key, default) for key, default in _KEYS.get(scorer, {}).items()},
    }
    if "reads" in config:
        return config | {"hidden_size": model["hidden_size"]}
    return config | {"decay": {"step": decay_step, "min": decay_min, "max": decay_max}}


def _scorer_weights(
    config: dict, sizes: dict[str, int], v_proj: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return one layer's tensors, float32, with the head axis first."""
    heads, pair = config["num_kv_heads"], 2 * config["head_dim"]
    if config["scorer"] in ("trimkv", "dms", "kvzap"):
        return _gate_weights(config, sizes, lambda *shape, std: std * torch.randn(*shape, generator=generator))

    def normal(*shape: int, std: float) -> torch.Tensor:
        return std * torch.randn(heads, *shape, generator=generator)

    unit = 1.0 / math.sqrt(pair)
    weights = {"decay_logit": normal(std=1.0)}
    if config["scorer"] == "linear":
        return weights | {"weight": normal(pair, std=2 * unit), "bias": normal(std=0.5)}
    if config["scorer"] == "mlp":
        width = sizes["M"]
        weights |= {"fc1.weight": normal(pair, width, std=unit), "fc1.bias": normal(width, std=0.5)}
        out = normal(width, std=4.0 / math.sqrt(width))
        return weights | {"fc2.weight": out, "fc2.bias": normal(std=0.5)}
    if config["scorer"] != "mlstm":
        raise ValueError(f"unknown scorer {config['scorer']!r}")
    features, width = sizes["F"], sizes["Dv"]
    weights |= {
        "q_proj": normal(pair, features, std=1.5 * unit),
        "k_proj": normal(pair, features, std=1.5 * unit),
        "igate.weight": normal(pair, std=unit),
        "igate.bias": normal(std=0.5),
        "fgate.weight": normal(pair, std=unit),
        # an open gate, so that the state reaches far back
        "fgate.bias": 2.0 + normal(std=0.5),
        "out.weight": normal(width, std=4.0 / math.sqrt(width)),
        "out.bias": normal(std=0.5),
    }
    if v_proj:
        weights["v_proj"] = normal(pair, width, std=1.5 * unit)
    if config["norm"]:
        weights["norm.weight"] = 1.0 + normal(width, std=0.2)
    if config["skip"]:
        weights["skip.weight"] = normal(pair, std=unit)
    return weights


def _gate_weights(config: dict, sizes: dict, normal: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return one layer's gate: betas from far below 1 to almost 1, eviction logits around ``evict``, scores around 0."""
    heads, inner = config["num_kv_heads"], sizes["M"]
    if config["scorer"] == "dms":
        weights = {"bias": sizes["evict"] + normal(heads, std=0.3)}
        if config["reads"] == "hidden":
            # scores multiply by the scale, which is taken out here
            std = 1.5 / config["scale"] / math.sqrt(config["hidden_size"])
            weights["weight"] = normal(heads, config["hidden_size"], std=std)
        return weights
    width = config["hidden_size"] if config["reads"] == "hidden" else 2 * heads * config["head_dim"]
    unit, out = 1.5 / math.sqrt(width), 4.0 / math.sqrt(inner)
    if config["scorer"] == "kvzap":
        bias = normal(heads, std=0.3)
        if config["linear"]:
            return {"weight": normal(heads, width, std=unit), "bias": bias}
        weights = {"fc1.weight": normal(inner, width, std=unit), "fc1.bias": normal(inner, std=0.5)}
        return weights | {"fc2.weight": normal(heads, inner, std=out), "fc2.bias": bias}
    # betas near 1, since scores are multiplied by ages
    weights = {"bias": 3.0 + normal(heads, std=0.5)}
    if config["gated"]:
        weights |= {f"{name}_proj.weight": normal(inner, width, std=unit) for name in ("gate", "up")}
        return weights | {"down_proj.weight": normal(heads, inner, std=out)}
    weights |= {"linear1.weight": normal(inner, width, std=unit), "linear1.bias": normal(inner, std=0.5)}
    if sizes["hidden_layers"] == 2:
        deep = {"linear2.weight": normal(inner, inner, std=out), "linear2.bias": normal(inner, std=0.5)}
        return weights | deep | {"linear3.weight": normal(heads, inner, std=out)}
    return weights | {"linear2.weight": normal(heads, inner, std=out)}


def random_prompt(length: int, vocab: int = 256, seed: int = 0) -> list[int]:
    """Return ``length`` uniformly random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()


def require_distant_influence(
    model_dir: str | Path, *, distance: int = 100, length: int = 160, min_change: float = 0.05
) -> float:
    """Check that a model's output depends on tokens more than ``distance`` positions back.

    Four tokens that far back are replaced, one at a time.

    Returns:
        The mean over them of the largest log-probability change at the last position (nats).

    Raises:
        AssertionError: the change is below ``min_change``, or a 16-token greedy continuation has fewer than four
            different tokens or only repeats the prompt's last token.
    """
    model = OracleModel(model_dir, torch.float32)
    vocab = model.config["vocab_size"]
    prompt = random_prompt(length, vocab, seed=1)
    before = model.run(prompt).logprobs[-1]
    changes = []
    for position in range(0, length - distance - 1, max(1, (length - distance) // 4)):
        changed = list(prompt)
        # another token than before, whatever it was
        changed[position] = (changed[position] + 1) % vocab
        changes.append(float((model.run(changed).logprobs[-1] - before).abs().max()))
    influence = sum(changes) / len(changes)
    continuation = model.greedy(prompt, 16)
    if influence < min_change:
        raise AssertionError(f"tokens {distance} back change log-probs by {influence:.2g} only")
    if len(set(continuation)) < 4 or set(continuation) == {prompt[-1]}:
        raise AssertionError(f"greedy continuation is too monotonous: {continuation}")
    return influence
