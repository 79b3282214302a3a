"""Wrappers of the model runners that pass request data to our metadata builders.

Attention metadata lack the slots of the requests and their seeds. The wrappers are listed with
their reasons in :mod:`kvpop_vllm.vllm_glue.patches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpop_vllm.vllm_glue.patches import wrap

_PARAMS = "_kvpop_params"


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
    params = [self.requests[name].sampling_params for name in batch.req_ids[:num_reqs]]
    prompts = batch.num_prompt_tokens_cpu_tensor[: len(params)].tolist()

    def seeds() -> list[int]:
        return [0 if own is None else own.seed or 0 for own in params]

    _hand_over(self._attn_group_iterator(), params, prompts, seeds)
    return original(self, num_tokens, num_reqs, *args, **kwargs)


def _add_requests(original, self, scheduler_output, *args, **kwargs):
    """Keep the sampling parameters of requests, because the runner's own states do not."""
    params = self.__dict__.setdefault(_PARAMS, {})
    for new in scheduler_output.scheduled_new_reqs:
        params[new.req_id] = new.sampling_params
    return original(self, scheduler_output, *args, **kwargs)


def _finish_requests(original, self, scheduler_output, *args, **kwargs):
    for name in scheduler_output.finished_req_ids:
        self.__dict__.get(_PARAMS, {}).pop(name, None)
    return original(self, scheduler_output, *args, **kwargs)


def _prepare_attn(original, self, input_batch, *args, **kwargs):
    rows, params = input_batch.idx_mapping_np, self.__dict__.get(_PARAMS, {})

    def seeds() -> list[int]:
        states = self.sampler.sampling_states
        # 0 for requests without a seed, which vLLM draws
        return (states.seeds.np[rows] * states.seeds_set[rows]).tolist()

    own, prompts = [params.get(name) for name in input_batch.req_ids], self.req_states.prompt_len.np[rows].tolist()
    _hand_over((group for groups in self.attn_groups for group in groups), own, prompts, seeds)
    return original(self, input_batch, *args, **kwargs)


def _hand_over(groups: Iterable, params: list, prompts: list[int], seeds: Callable[[], list[int]]) -> None:
    """Pass the slots of a step's requests to our metadata builders.

    Args:
        groups: attention groups, those of other backends among them.
        params: sampling parameters of each request, or None.
        prompts: tokens of each prompt.
        seeds: returns the sampling seed of each request; called only where scores are drawn.
    """
    for builder in (builder for group in groups for builder in group.metadata_builders):
        if hasattr(builder, "take_requests"):
            builder.take_requests(params, prompts, seeds() if builder.policy.draws else None)
