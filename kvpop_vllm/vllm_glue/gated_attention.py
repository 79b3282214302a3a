"""What an attention backend never sees, handed to it with the query: the route of policies with a gate.

vLLM's attention op takes q, k and v after RoPE, as an opaque piece of the compiled graph. A gate's scores must reach it as one
more argument: what is left in a buffer or on an object would be written at another time than it is read, as the compiler
orders a graph by its tensors alone. So the attention modules of a model with a gate call an op of our own, the same
as vLLM's with ``given`` beside q, k and v.

The modules are vLLM's own, of a class with another ``forward``; that of an instance is exchanged after its model has been built,
which leaves its parameters, names and registration as they are.
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
from kvpop_vllm.scorers.gates import Signals

LIBRARY = Library("kvpop_vllm", "FRAGMENT")


@eager_break_during_capture
def attention_with_given(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    given: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """One layer's attention, written to ``output [T, Hq, D]``; query ``[T, Hq, D]``, key, value ``[T, H, D]``, given ``[T, H]``
    float32."""
    metadata, layer, kv_cache, _ = get_attention_context(layer_name)
    layer.impl.forward(layer, query, key, value, kv_cache, metadata, output=output, given=given)


def _writes_nothing_here(query, key, value, given, output, layer_name) -> None:
    """What a trace makes of the op."""


direct_register_custom_op(
    "attention_with_given",
    attention_with_given,
    mutates_args=["output"],
    fake_impl=_writes_nothing_here,
    target_lib=LIBRARY,
)


def attend(layer: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """q ``[T, Hq * D]``, k, v ``[T, H * D]``, given ``[T, H]`` -> ``[T, Hq * D]``."""
    output = torch.empty_like(q)
    by_head = [
        x.view(-1, heads, layer.head_size)
        for x, heads in ((q, layer.num_heads), (k, layer.num_kv_heads), (v, layer.num_kv_heads))
    ]
    out = output.view(-1, layer.num_heads, layer.head_size)
    torch.ops.kvpop_vllm.attention_with_given(*by_head, given, out, layer.layer_name)
    return output


class _Gated:
    """Mixed in before an attention module of vLLM. Its ``gates`` holds the layer's gate once weights have been loaded."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
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
        given = gate(Signals(hidden_states, k.view(by_head), v.view(by_head), channel))
        output, _ = self.o_proj(attend(self.attn, q, k, v, given))
        return output

    def normed(self, x: torch.Tensor, of_keys: bool = False) -> torch.Tensor:
        """Queries or keys ``[T, heads * D]`` as they go into RoPE."""
        return x

    def _without_channel(self, q: torch.Tensor) -> torch.Tensor:
        """Queries whose borrowed channel is 0."""
        place = torch.arange(self.q_size, device=q.device)
        borrowed = place % (self.q_size // self.num_kv_heads) == self.head_dim - 1
        return torch.where(borrowed, torch.zeros_like(q), q)


class GatedLlamaAttention(_Gated, LlamaAttention):
    """Llama's."""


class GatedQwen3Attention(_Gated, Qwen3Attention):
    """Qwen3's, with its norms of queries and keys."""

    def normed(self, x, of_keys=False):
        norm = self.k_norm if of_keys else self.q_norm
        return norm(x.view(*x.shape[:-1], -1, self.head_dim)).view(x.shape)


_CLASSES = {LlamaAttention: GatedLlamaAttention, Qwen3Attention: GatedQwen3Attention}


def prepare(model: nn.Module, policy: Policy) -> None:
    """Makes the attention modules of a model gated, if the policy has a gate. The gates themselves are put in by the layers'
    attention implementations when weights have been loaded."""
    for module in model.modules() if policy.gated else ():
        if type(module) in _CLASSES:
            module.__class__ = _CLASSES[type(module)]
            module.gates = nn.ModuleList()
            module.attn.impl.gates = module.gates
