"""How many tokens each request's prompt has, which attention metadata do not say: one wrapper, listed with its reason in
:mod:`kvpop_vllm.vllm_glue.patches`."""

from __future__ import annotations

from kvpop_vllm.vllm_glue.patches import wrap


def apply() -> None:
    """Wraps the building of metadata; called where a metadata builder needs it, may be called again."""
    wrap("vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata", _build)


def _build(original):
    def build_attention_metadata(self, num_tokens, num_reqs, *args, **kwargs):
        for group in self._attn_group_iterator():
            for builder in group.metadata_builders:
                if hasattr(builder, "prompts"):
                    builder.prompts = self.input_batch.num_prompt_tokens_cpu_tensor[:num_reqs].long()
        return original(self, num_tokens, num_reqs, *args, **kwargs)

    return build_attention_metadata
