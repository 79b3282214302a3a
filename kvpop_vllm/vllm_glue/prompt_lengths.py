"""What attention metadata do not say of requests: how many tokens the prompts have, and their seeds. A wrapper for each model
runner, listed with their reasons in :mod:`kvpop_vllm.vllm_glue.patches`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvpop_vllm.kernels.draws import signed
from kvpop_vllm.vllm_glue.patches import wrap

RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn"


def apply() -> None:
    """Wraps the building of metadata; called where a metadata builder needs it, may be called again."""
    wrap(RUNNER_V1, _build)


def apply_v2() -> None:
    """The same of model runner V2, which only GPUs have."""
    wrap(RUNNER_V2, _prepare)


def _build(original):
    def build_attention_metadata(self, num_tokens, num_reqs, *args, **kwargs):
        batch = self.input_batch
        names = batch.req_ids[:num_reqs]
        prompts = batch.num_prompt_tokens_cpu_tensor[:num_reqs].to(torch.int64, copy=True)
        prompts[len(names) :] = 0  # of a dummy run

        def seeds() -> torch.Tensor:
            params = [self.requests[name].sampling_params for name in names]
            own = [0 if each is None else signed(each.seed or 0) for each in params]
            return torch.tensor(own + [0] * (num_reqs - len(own)))

        for group in self._attn_group_iterator():
            _hand_over(group.metadata_builders, prompts, seeds)
        return original(self, num_tokens, num_reqs, *args, **kwargs)

    return build_attention_metadata


def _prepare(original):
    def prepare_attn(self, input_batch):
        chosen = input_batch.idx_mapping_np
        prompts = torch.from_numpy(self.req_states.prompt_len.np[chosen]).long()

        def seeds() -> torch.Tensor:
            states = self.sampler.sampling_states
            return torch.from_numpy(states.seeds.np[chosen] * states.seeds_set[chosen])  # others are drawn by lot

        for groups in self.attn_groups:
            for group in groups:
                _hand_over(group.metadata_builders, prompts, seeds)
        return original(self, input_batch)

    return prepare_attn


def _hand_over(builders, prompts: torch.Tensor, seeds: Callable[[], torch.Tensor]) -> None:
    """Set ``prompts`` and, where scores are drawn, ``seeds``, ``[requests]`` int64 on the CPU, of our builders."""
    for builder in builders:
        if hasattr(builder, "prompts"):
            builder.prompts, builder.seeds = prompts, seeds() if builder.draws else None
