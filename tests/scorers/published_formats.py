"""Folders of gates as their authors' public code writes them; no code is shared with the reader.

DBTrimKV: ``trimkv`` 0.1.5 (``models/qwen3``: ``RetentionGate10``, ``TrimKVQwen3Config``,
``_tie_retention_gate_layers``). FastDMS: ``shisa-ai/FastDMS`` (``fastdms/engine/dms.py``, ``training/dms_eval.py``), of
which ``Llama-3.2-1B-DMS-8x`` is a checkpoint. IndexMem: ``Chooovy/kvpress`` (``kvpress/indexmem``:
``save_scorer_checkpoint``, ``RetentionScorer``), of which ``marcusguhao/IndexMem-Qwen3-4B`` is a checkpoint.
"""

import json
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama import modeling_llama

from kvpop_vllm.testing import write_tiny_model

TRIMKV_KEYS = {
    "retention_gate_bias_init": 18.0, "retention_weight": 1.0, "memory_size": 128, "retention_gate": "rg10",
    "base_loss": "fwkl", "attn_impl": "rg_attn_flex", "trainable_params": "self_attn.retention_gate",
    "max_seq_len": 32768, "retention_gate_intermediate_size": 16, "logit_block_size": -1, "global_capacity": True,
    "tie_retention_gate_layers": True, "base_model": "Qwen/Qwen3-4B",
}  # fmt: skip
FASTDMS_KEYS = {"dms_window_size": 24, "dms_alpha_scale": 100.0, "dms_alpha_offset": 5.0, "dms_cr": 8}
FASTDMS_METADATA = {
    "window_size": 24,
    "alpha_scale": 100.0,
    "alpha_offset": 5.0,
    "target_cr": 8,
    "context_len": 4096,
    "compression_mode": "relu",
}


class TiedGate(nn.Module):
    """DBTrimKV's gate of one layer; all layers share the last projection and its bias."""

    def __init__(self, width: int, inner: int, heads: int, last: nn.Linear, bias: nn.Parameter):
        super().__init__()
        self.linear1, self.linear2, self.linear3 = nn.Linear(width, inner), nn.Linear(inner, inner), last
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log beta ``[.., H]`` of the attention block's input ``[.., E]``."""
        inner = F.silu(self.linear2(F.silu(self.linear1(x))))
        return F.logsigmoid(self.linear3(inner) + self.bias)


def write_dbtrimkv(folder: Path) -> list[TiedGate]:
    """Write a folder of DBTrimKV's gates for a tiny Qwen3, and return the gates."""
    write_tiny_model(folder, "qwen3")
    (folder / "model.safetensors").unlink()
    change_json(folder / "config.json", TRIMKV_KEYS)
    torch.manual_seed(0)
    last, bias = nn.Linear(16, 2, bias=False), nn.Parameter(torch.randn(2) + 3)
    gates = [TiedGate(64, 16, 2, last, bias).requires_grad_(False) for _ in range(2)]
    prefix = "model.layers.{}.self_attn.retention_gate.{}"
    torch.save(
        {prefix.format(i, name): t for i, gate in enumerate(gates) for name, t in gate.state_dict().items()},
        folder / "trimkv_weights.pth",
    )
    return gates


def write_indexmem(folder: Path) -> Path:
    """Write a folder of IndexMem's scorers for a tiny Qwen3."""
    config = {"kind": "mlp", "hidden_size": 64, "n_heads": 2, "mid_dim": 16, "norm_eps": 1e-5, "pos_slope": 1e-6}
    config |= {"gate_scale": True, "decay": True, "age_scale": 16384.0, "decay_init": -1.0}
    shapes = {"in_norm.weight": (64,), "in_norm.bias": (64,), "input_proj.weight": (16, 64), "mid_norm.weight": (16,)}
    shapes |= {"mid_norm.bias": (16,), "magnitude_proj.weight": (2, 16), "retention_proj.weight": (2, 16)}
    shapes |= {"retention_proj.bias": (2,), "gate_scale": (1,)}
    scorers = {f"{i}.{name}": torch.ones(shape) for i in range(2) for name, shape in shapes.items()}
    folder.mkdir()
    torch.save(
        {"scorer_config": config, "scorers": scorers, "step": 0, "training_config": None}, folder / "indexmem.pt"
    )
    (folder / "scorer.json").write_text(json.dumps(config))
    return folder


def write_fastdms(folder: Path) -> Path:
    """Write a tiny Llama whose gates are a query channel, with FastDMS's settings in both files."""
    write_tiny_model(folder, "llama")
    change_json(folder / "config.json", FASTDMS_KEYS)
    (folder / "dms_metadata.json").write_text(json.dumps(FASTDMS_METADATA))
    return folder


def change_json(path: Path, changes: dict) -> None:
    """Change keys of a JSON object in a file; ``...`` removes one."""
    content = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


@torch.no_grad()
def fastdms_logits(model: nn.Module, tokens: torch.Tensor, *, rotated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a FastDMS model's logits ``[1, T, V]`` with its evictions as masks, and all eviction logits.

    A token whose logit is above 0 is hidden from later queries beyond the window. The channel with the logit is
    0 before RoPE, which turns a part of another channel into it.

    Args:
        model: a Llama of transformers with eager attention.
        tokens: ``[1, T]``.
        rotated: True as the authors have it; False to set the channel to 0 after RoPE too.
    """
    config, eviction_logits = model.config, []
    heads, dim = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // heads
    rows = torch.arange(heads) * group * dim + dim - 1
    positions = torch.arange(tokens.shape[1])
    distance = positions[:, None] - positions[None, :]

    def evict(module, args, kwargs):
        channel = F.linear(kwargs["hidden_states"], module.q_proj.weight[rows])[0].T
        logits = channel * FASTDMS_KEYS["dms_alpha_scale"] - FASTDMS_KEYS["dms_alpha_offset"]
        eviction_logits.append(logits)
        hidden = (logits > 0)[:, None, :] & (distance > FASTDMS_KEYS["dms_window_size"]) | (distance < 0)
        mask = torch.zeros(heads, *distance.shape).masked_fill(hidden, float("-inf"))
        return args, kwargs | {"attention_mask": mask.repeat_interleave(group, 0)[None]}

    def give_up(module, args, out):
        out[..., rows] = 0
        return out

    hooks = [layer.self_attn.register_forward_pre_hook(evict, with_kwargs=True) for layer in model.model.layers]
    hooks += [layer.self_attn.q_proj.register_forward_hook(give_up) for layer in model.model.layers]
    rotate = modeling_llama.apply_rotary_pos_emb

    def rotate_without(q, k, *args, **kwargs):
        q, k = rotate(q, k, *args, **kwargs)
        q[:, ::group, :, -1] = 0
        return q, k

    with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", rotate if rotated else rotate_without):
        logits = model(tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(eviction_logits)
