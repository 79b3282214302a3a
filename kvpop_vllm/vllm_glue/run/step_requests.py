"""Wrappers of the model runners that pass request data to our metadata builders.

Attention metadata lack prompt lengths, cache options and seeds of the requests. The wrappers are listed with
their reasons in :mod:`kvpop_vllm.vllm_glue.patches`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvpop_vllm.kernels.draws import signed
from kvpop_vllm.requests import RequestCache, of_params
from kvpop_vllm.vllm_glue.patches import wrap

_ASKED = "_kvpop_asked"


def apply() -> None:
    """Wrap the building of metadata in model runner V1; may be called more than once."""
    wrap("vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata", _build_attention_metadata)


def apply_v2() -> None:
    """Wrap model runner V2, which only GPUs have; may be called more than once."""
    runner = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    wrap(f"{runner}.prepare_attn", _prepare_attn)
    wrap(f"{runner}.add_requests", _add_requests)
    wrap(f"{runner}.finish_requests", _finish_requests)


def _build_attention_metadata(original, self, num_tokens, num_reqs, *args, **kwargs):
    batch = self.input_batch
    names = batch.req_ids[:num_reqs]
    prompts = batch.num_prompt_tokens_cpu_tensor[:num_reqs].to(torch.int64, copy=True)
    prompts[len(names) :] = 0  # rows of a dummy run
    params = [self.requests[name].sampling_params for name in names]

    def seeds() -> torch.Tensor:
        own = [0 if each is None else signed(each.seed or 0) for each in params]
        return torch.tensor(own + [0] * (num_reqs - len(own)))

    for group in self._attn_group_iterator():
        _hand_over(group.metadata_builders, prompts, [of_params(each) for each in params], seeds)
    return original(self, num_tokens, num_reqs, *args, **kwargs)


def _add_requests(original, self, scheduler_output, *args, **kwargs):
    """Keep what requests asked for, because the runner's own states do not."""
    known = self.__dict__.setdefault(_ASKED, {})
    for new in scheduler_output.scheduled_new_reqs:
        known[new.req_id] = of_params(new.sampling_params)
    return original(self, scheduler_output, *args, **kwargs)


def _finish_requests(original, self, scheduler_output, *args, **kwargs):
    for name in scheduler_output.finished_req_ids:
        self.__dict__.get(_ASKED, {}).pop(name, None)
    return original(self, scheduler_output, *args, **kwargs)


def _prepare_attn(original, self, input_batch, *args, **kwargs):
    chosen = input_batch.idx_mapping_np
    prompts = torch.from_numpy(self.req_states.prompt_len.np[chosen]).long()

    def seeds() -> torch.Tensor:
        states = self.sampler.sampling_states
        # 0 for requests without a seed, which vLLM draws
        return torch.from_numpy(states.seeds.np[chosen] * states.seeds_set[chosen])

    known = self.__dict__.get(_ASKED, {})
    asked = [known.get(name) for name in input_batch.req_ids]
    for groups in self.attn_groups:
        for group in groups:
            _hand_over(group.metadata_builders, prompts, asked, seeds)
    return original(self, input_batch, *args, **kwargs)


def _hand_over(
    builders, prompts: torch.Tensor, asked: list[RequestCache | None], seeds: Callable[[], torch.Tensor]
) -> None:
    """Pass the data of a step's requests to our metadata builders.

    Args:
        builders: metadata builders, those of other backends among them.
        prompts: ``[requests]`` int64 on the CPU, tokens of each prompt.
        asked: cache options of each request, or None.
        seeds: returns ``[requests]`` int64 on the CPU; called only where scores are drawn.
    """
    for builder in builders:
        if hasattr(builder, "prompts"):
            builder.prompts, builder.asked, builder.seeds = prompts, asked, seeds() if builder.policy.draws else None
