"""Model classes of full checkpoints: vLLM's own, which in addition take the scorer tensors out of the weight stream."""

from collections.abc import Iterable, Iterator

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from kvpop_vllm.scorers import checkpoint
from kvpop_vllm.scorers.published_checkpoint import MODEL_NAMES
from kvpop_vllm.vllm_glue.start.engine_policy import policy_from_checkpoint, requested
from kvpop_vllm.vllm_glue.start.published import serves_published

_DMS_PROJECTION = ".self_attn.dms_proj_alpha"
"""Substring of the names of a DMS model's eviction projections and of their norms."""


class _CarriesScorers:
    """Mixin before a vLLM model that passes scorer tensors to the engine's policy.

    The tensors are dropped if no policy uses them.

    vLLM loads weights before it processes the weights of the attention layers, which is when a layer asks the
    policy for its rule.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._engine_config = vllm_config

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the model's own weights and hand the scorer tensors to the policy.

        Args:
            weights: (name, tensor) pairs of a checkpoint.

        Returns:
            Names of the loaded parameters.

        Raises:
            ConfigError: a scorer tensor is missing or has a wrong name, shape or value.
        """
        published = serves_published(self._engine_config)
        policy, source = policy_from_checkpoint(self._engine_config), self._engine_config.model_config.model
        scorers: dict[str, torch.Tensor | None] = {}

        def models_own() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if _DMS_PROJECTION in name and requested(self._engine_config):
                    continue  # imported into a scorer folder by kvpop import
                if published and not MODEL_NAMES.match(name):
                    continue  # read from the folder by the policy
                if checkpoint.looks_like_scorer(name):
                    scorers[name] = tensor.clone() if policy else None  # a loader may reuse its buffers
                else:
                    yield name, tensor

        loaded = super().load_weights(models_own())
        if policy:
            for i, tensors in enumerate(checkpoint.layers_of(policy.config, scorers, source)):
                policy.set_tensors(i, tensors)
        elif scorers:
            checkpoint.check_layout(scorers, source)
        return loaded


class Qwen3KVpopForCausalLM(_CarriesScorers, Qwen3ForCausalLM):
    """Qwen3 with scorers."""


class LlamaKVpopForCausalLM(_CarriesScorers, LlamaForCausalLM):
    """Llama with scorers."""
