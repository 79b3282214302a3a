"""Attention modules that pass gate scores to the attention backend, for policies with a gate.

vLLM's attention op takes q, k and v after RoPE and is an opaque part of the compiled graph. Gate scores must
reach it as a further argument: the compiler orders a graph by its tensors alone, so that a buffer or an
attribute could be written at another time than it is read. Attention modules of a model with a gate therefore
call an op of this module, which equals vLLM's with ``gate_scores`` next to q, k and v.

The modules are vLLM's own with another ``forward``. The class of an instance is exchanged after its model has
been built, which leaves its parameters, names and registration unchanged.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.library import Library
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.attention.attention import Attention, get_attention_context
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.utils.torch_utils import direct_register_custom_op

from kvpop_vllm.policies import Policy
from kvpop_vllm.scorers import Signals

LIBRARY = Library("kvpop_vllm", "FRAGMENT")


@eager_break_during_capture
def attention_with_gate_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate_scores: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """Compute the attention of one layer and write it to ``output``.

    Args:
        query: ``[T, Hq, D]``.
        key: ``[T, H, D]``.
        value: ``[T, H, D]``.
        gate_scores: ``[T, H]`` float32, gate scores.
        output: ``[T, Hq, D]``, overwritten.
        layer_name: the layer's name in vLLM's forward context.
    """
    metadata, layer, kv_cache, _ = get_attention_context(layer_name)
    layer.impl.forward(layer, query, key, value, kv_cache, metadata, output=output, gate_scores=gate_scores)


def _writes_nothing_here(query, key, value, gate_scores, output, layer_name) -> None:
    """Trace the op: it returns nothing, and the tracer knows that it writes ``output``."""


direct_register_custom_op(
    "attention_with_gate_scores",
    attention_with_gate_scores,
    mutates_args=["output"],
    fake_impl=_writes_nothing_here,
    target_lib=LIBRARY,
)


def attend(
    layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate_scores: torch.Tensor
) -> torch.Tensor:
    """Return the attention of one layer with gate scores.

    Args:
        layer: vLLM's attention layer.
        q: ``[T, Hq * D]``.
        k: ``[T, H * D]``.
        v: ``[T, H * D]``.
        gate_scores: ``[T, H]`` float32, gate scores.

    Returns:
        ``[T, Hq * D]``.
    """
    output = torch.empty_like(q)
    by_head = [
        x.view(-1, heads, layer.head_size)
        for x, heads in ((q, layer.num_heads), (k, layer.num_kv_heads), (v, layer.num_kv_heads))
    ]
    out = output.view(-1, layer.num_heads, layer.head_size)
    torch.ops.kvpop_vllm.attention_with_gate_scores(*by_head, gate_scores, out, layer.layer_name)
    return output


class _Gated:
    """Mixin before an attention module of vLLM.

    ``gates`` holds the layer's gate once weights have been loaded.
    """

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the layer's attention output ``[T, hidden]`` with gate scores passed to attention."""
        gate, heads, group = self.gates[0], self.num_kv_heads, self.num_heads // self.num_kv_heads
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.normed(q), self.normed(k, of_keys=True)
        channel = None
        if gate.borrows:
            channel = q.view(-1, heads, group, self.head_dim)[:, :, 0, -1]
            q = self._without_channel(q)
        q, k = self.rotary_emb(positions, q, k)
        if gate.borrows:
            q = self._without_channel(q)
        by_head = (-1, heads, self.head_dim)
        gate_scores = gate(Signals(hidden_states, k.view(by_head), v.view(by_head), channel))
        output, _ = self.o_proj(attend(self.attn, q, k, v, gate_scores))
        return output

    def normed(self, x: torch.Tensor, of_keys: bool = False) -> torch.Tensor:
        """Return queries or keys ``[T, heads * D]`` as they enter RoPE."""
        return x

    def _without_channel(self, q: torch.Tensor) -> torch.Tensor:
        """Return the queries with the borrowed channel set to 0."""
        place = torch.arange(self.q_size, device=q.device)
        borrowed = place % (self.q_size // self.num_kv_heads) == self.head_dim - 1
        return torch.where(borrowed, torch.zeros_like(q), q)


class GatedLlamaAttention(_Gated, LlamaAttention):
    """Attention of Llama."""


class GatedQwen3Attention(_Gated, Qwen3Attention):
    """Attention of Qwen3, with its norms of queries and keys."""

    def normed(self, x, of_keys=False):
        """Return queries or keys ``[T, heads * D]`` after Qwen3's norm."""
        norm = self.k_norm if of_keys else self.q_norm
        return norm(x.view(*x.shape[:-1], -1, self.head_dim)).view(x.shape)


_CLASSES = {LlamaAttention: GatedLlamaAttention, Qwen3Attention: GatedQwen3Attention}


def prepare(model: nn.Module, policy: Policy) -> None:
    """Turn the attention modules of a model into gated ones if the policy has a gate.

    The layers' attention implementations add the gates when weights have been loaded.
    """
    for module in model.modules() if policy.gated else ():
        if type(module) in _CLASSES:
            module.__class__ = _CLASSES[type(module)]
            module.gates = nn.ModuleList()
            module.attn.impl.gates = module.gates
