"""Attention layers that pass gate scores to the attention backend, for policies with a gate, in models of any architecture.

vLLM's attention op takes q, k and v after RoPE and is an opaque part of the compiled graph. Gate scores must
reach it as a further argument: the compiler orders a graph by its tensors alone, so that a buffer or an
attribute of ours could be written at another time than the op reads it. Layers with a gate therefore call an op of this
module, which equals vLLM's with ``gate_scores`` next to q, k and v.

The layers are vLLM's own with another ``forward``. The class of an instance is exchanged after its model has
been built, which leaves its parameters, names and registration unchanged. A hook on the module around a layer hands over
the hidden states. All of this is traced, so that the compiler sees tensors that flow from one to the other.
"""

import functools
import inspect

import torch
from torch import nn
from torch.library import Library
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.attention.attention import Attention, get_attention_context
from vllm.utils.torch_utils import direct_register_custom_op

from kvpop_vllm.config import ConfigError
from kvpop_vllm.scorers import Signals
from kvpop_vllm.supported import rotates
from kvpop_vllm.vllm_glue.run.backend import FixedBudgetImpl

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


class GateInputs:
    """Inputs of a layer's gate in addition to keys and values, from when its module has them until the layer attends.

    Attributes:
        hidden: ``[T, E]`` or ``[1, T, E]``, input of the module around the layer.
        channel: ``[T, H]``, the borrowed channel, None where queries do not rotate.
    """

    def __init__(self):
        self.hidden: torch.Tensor | None = None
        self.channel: torch.Tensor | None = None


class _Gated:
    """Mixin before an attention layer of vLLM.

    Attributes:
        gates: holds the layer's gate once weights have been loaded.
        gate_inputs: what the gate reads.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the layer's attention ``[T, Hq * D]``.

        Args:
            query: ``[T, Hq * D]``.
            key: ``[T, H * D]``.
            value: ``[T, H * D]``.
            output_shape: shape of the output for layers whose values are narrower than keys, which no policy serves.
            output_dtype: dtype of the output, None for that of queries.
        """
        gate, inputs = self.gates[0], self.gate_inputs
        hidden, channel = inputs.hidden, inputs.channel
        inputs.hidden = inputs.channel = None
        query = query.view(-1, self.num_heads * self.head_size)
        if gate.borrows:
            unrotated, query = take_channel(query, self)
            channel = unrotated if channel is None else channel
        heads = ((query, self.num_heads), (key, self.num_kv_heads), (value, self.num_kv_heads))
        q, k, v = (x.view(-1, count, self.head_size) for x, count in heads)
        signals = Signals(hidden.flatten(0, -2), k, v, channel)  # models of transformers have [1, T, E]
        gate_scores, output = gate(signals), torch.empty_like(query, dtype=output_dtype)
        torch.ops.kvpop_vllm.attention_with_gate_scores(q, k, v, gate_scores, output.view_as(q), self.layer_name)
        return output


class _Borrowing(nn.Module):
    """Rotary embedding of one layer that hands over the queries' borrowed channel, as it is before RoPE."""

    def __init__(self, rotary: nn.Module, layer: Attention):
        super().__init__()
        self.rotary, self.layer = rotary, (layer,)  # in a tuple, so that it is no submodule

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor):
        """Return rotated queries and keys. Arguments are those of vLLM's rotary embeddings."""
        (layer,) = self.layer
        layer.gate_inputs.channel, query = take_channel(query, layer)
        return self.rotary(positions, query, key)


def take_channel(query: torch.Tensor, layer: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the borrowed channel ``[T, H]`` of queries ``[T, Hq * D]``, and the queries with 0 in its place."""
    place = torch.arange(query.shape[-1], device=query.device)
    group = layer.num_heads // layer.num_kv_heads * layer.head_size
    borrowed = place % group == layer.head_size - 1
    channel = query.view(-1, layer.num_kv_heads, group)[:, :, layer.head_size - 1]
    return channel, torch.where(borrowed, torch.zeros_like(query), query)


@functools.cache
def _gated_class(cls: type[Attention]) -> type[Attention]:
    """Return the class of layers of ``cls`` with a gate."""
    return type(f"Gated{cls.__name__}", (_Gated, cls), {"__module__": __name__})


def process_weights(original, model: nn.Module, *args, **kwargs):
    """Wrap the processing of loaded weights, in which layers ask for their gates: they are given room for them before."""
    prepare(model)
    return original(model, *args, **kwargs)


def prepare(model: nn.Module) -> None:
    """Turn the attention layers of a model whose policy has a gate into gated ones, unless they are.

    Layers that no module with hidden states calls are left as they are. Their implementations refuse to serve them when
    they add the gates.

    Raises:
        ConfigError: a gate borrows a channel before RoPE, and the module around its layer does not rotate.
    """
    for module in list(model.modules()):
        for layer in list(module.children()):
            impl = getattr(layer, "impl", None)
            if not isinstance(impl, FixedBudgetImpl) or not impl.policy.gated or impl.gates is not None:
                continue
            if (place := _place_of_hidden_states(type(module))) is None:
                continue
            layer.__class__ = _gated_class(type(layer))
            layer.gates, layer.gate_inputs = nn.ModuleList(), GateInputs()
            impl.gates = layer.gates
            module.register_forward_pre_hook(functools.partial(_hand_over, layer.gate_inputs, place), with_kwargs=True)
            if impl.policy.borrows and rotates(impl.vllm_config.model_config.hf_text_config):
                if not hasattr(module, "rotary_emb"):
                    raise ConfigError(
                        f"the gate borrows a channel of the queries before RoPE, which {type(module).__name__} does not have:"
                        " leave --model-impl out"
                    )
                module.rotary_emb = _Borrowing(module.rotary_emb, layer)


def _place_of_hidden_states(cls: type[nn.Module]) -> int | None:
    """Return the place of hidden states among the positional arguments of a class of modules, None if they are none of them."""
    names = [*inspect.signature(cls.forward).parameters]
    return names.index("hidden_states") - 1 if "hidden_states" in names else None


def _hand_over(inputs: GateInputs, place: int, module: nn.Module, positional: tuple, named: dict) -> None:
    """Hand the hidden states of a module's call to its attention layer's gate, before the call."""
    inputs.hidden = named["hidden_states"] if "hidden_states" in named else positional[place]
