"""Tiny models that draft: an EAGLE3 head in a folder of its own, and layers of multi-token prediction in a target's."""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kvpop_vllm.testing import write_tiny_model

DRAFTS = 3


def write_eagle3(folder: Path, target: str) -> dict:
    """Write an EAGLE3 head for a target with random weights, and return the ``speculative_config`` of an engine."""
    config = json.loads((Path(target) / "config.json").read_text())
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True},
    }
    drawn = _drawn(torch.Generator().manual_seed(3))
    layer = _layer(config, 2 * hidden, drawn) | {"hidden_norm.weight": torch.ones(hidden)}
    weights = {f"midlayer.{name}": x for name, x in layer.items()}
    weights |= {"fc.weight": drawn(hidden, 2 * hidden), "norm.weight": torch.ones(hidden)}
    weights |= {"lm_head.weight": drawn(vocab, hidden), "embed_tokens.weight": drawn(vocab, hidden)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": DRAFTS}


def write_mtp(folder: Path) -> dict:
    """Write a target with one layer of multi-token prediction, and return the ``speculative_config`` of an engine.

    The target is a Qwen2, as MiMo is, whose architecture it names.
    """
    write_tiny_model(folder, "qwen2", hidden=128)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    drawn, hidden = _drawn(torch.Generator().manual_seed(4)), config["hidden_size"]
    layer = _layer(config, hidden, drawn) | {"input_proj.weight": drawn(hidden, 2 * hidden)}
    for part in "qkv":
        layer[f"self_attn.{part}_proj.bias"] = torch.zeros(len(layer[f"self_attn.{part}_proj.weight"]))
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        layer[f"{name}.weight"] = torch.ones(hidden)
    weights = load_file(folder / "model.safetensors")
    weights |= {f"model.mtp_layers.0.{name}": x for name, x in layer.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return {"method": "mtp", "num_speculative_tokens": DRAFTS}


@contextmanager
def right_drafts(runner, texts: Iterable[list[int]], counts: Iterator[int]) -> Iterator[None]:
    """Have given numbers of the drafts that a runner's layers make be right ones; the layers run as they would.

    Args:
        runner: vLLM's model runner on a CPU.
        texts: whole texts.
        counts: endless numbers of right drafts, one for each request and step; later drafts are wrong.
    """
    texts, propose = [*texts], runner.propose_draft_token_ids

    def proposed(scheduler_output, sampled_token_ids, *args, **kwargs):
        drafts, batch = propose(scheduler_output, sampled_token_ids, *args, **kwargs).clone(), runner.input_batch
        for i, sampled in enumerate(sampled_token_ids.tolist()):
            before = batch.token_ids_cpu[i, : batch.num_tokens_no_spec[i]].tolist()
            tokens = [*before, *(token for token in sampled if token >= 0)]
            continuation = next((text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens), [])[:DRAFTS]
            right = next(counts) if continuation else 0
            for j, token in enumerate(continuation):
                drafts[i, j] = token if j < right else (token + 1) % 256
        return drafts

    runner.propose_draft_token_ids = proposed
    try:
        yield
    finally:
        del runner.propose_draft_token_ids


def _drawn(generator: torch.Generator):
    """Return ``draw(rows, columns)``, which returns random weights."""
    return lambda rows, columns: torch.randn(rows, columns, generator=generator) / math.sqrt(columns)


def _layer(config: dict, inputs: int, drawn) -> dict[str, torch.Tensor]:
    """Return the weights of a decoder layer whose attention reads ``inputs`` numbers."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (wide, inputs), "self_attn.k_proj": (narrow, inputs), "self_attn.v_proj": (narrow, inputs),
        "self_attn.o_proj": (hidden, wide), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = {f"{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"{name}.weight": drawn(*shape) for name, shape in shapes.items()} | norms
