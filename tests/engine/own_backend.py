"""Llama whose last layers bring vLLM's attention backend instead of the one that is chosen, as MiniMax M3's sparse layers do."""

from typing import ClassVar

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend


class OwnBackendForCausalLM(LlamaForCausalLM):
    """Llama of which the layers from ``first`` on have an attention of their own."""

    first: ClassVar[int]

    def __init__(self, *, vllm_config, prefix: str = "", **options):
        super().__init__(vllm_config=vllm_config, prefix=prefix, **options)
        context = vllm_config.compilation_config.static_forward_context
        for layer in self.model.layers[self.first :]:
            usual = layer.self_attn.attn
            name = usual.layer_name
            del context[name]
            sizes = usual.num_heads, usual.head_size, usual.impl.scale
            options = {"cache_config": vllm_config.cache_config, "prefix": name, "num_kv_heads": usual.num_kv_heads}
            layer.self_attn.attn = Attention(*sizes, **options, attn_backend=CPUAttentionBackend)
