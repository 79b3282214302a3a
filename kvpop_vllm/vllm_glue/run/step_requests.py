"""Wrappers of the model runners that pass request data to our metadata builders.

Attention metadata lack the slots of the requests and their seeds.
"""

from collections.abc import Iterable

_PARAMS = "_kvpop_params"


def build_attention_metadata(original, self, num_tokens, num_reqs, *args, **kwargs):
    """Wrap the building of a step's metadata in model runner V1."""
    batch = self.input_batch
    params = [self.requests[name].sampling_params for name in batch.req_ids[:num_reqs]]
    prompts = batch.num_prompt_tokens_cpu_tensor[: len(params)].tolist()
    drafts = self.num_decode_draft_tokens.np[: len(params)].tolist() if kwargs.get("use_spec_decode") else None
    _hand_over(self._attn_group_iterator(), params, prompts, drafts)
    return original(self, num_tokens, num_reqs, *args, **kwargs)


def add_requests(original, self, scheduler_output, *args, **kwargs):
    """Keep the sampling parameters of requests, because the runner's own states do not."""
    params = self.__dict__.setdefault(_PARAMS, {})
    for new in scheduler_output.scheduled_new_reqs:
        params[new.req_id] = new.sampling_params
    return original(self, scheduler_output, *args, **kwargs)


def finish_requests(original, self, scheduler_output, *args, **kwargs):
    """Forget what requests asked for when they are done."""
    for name in scheduler_output.finished_req_ids:
        self.__dict__.get(_PARAMS, {}).pop(name, None)
    return original(self, scheduler_output, *args, **kwargs)


def prepare_attn(original, self, input_batch, *args, **kwargs):
    """Wrap the building of a step's metadata in model runner V2."""
    rows, params = input_batch.idx_mapping_np, self.__dict__.get(_PARAMS, {})
    sampling, prompts = [params.get(name) for name in input_batch.req_ids], self.req_states.prompt_len.np[rows].tolist()
    counts = input_batch.num_draft_tokens_per_req
    drafts = None if counts is None else counts.tolist()
    _hand_over((group for groups in self.attn_groups for group in groups), sampling, prompts, drafts)
    return original(self, input_batch, *args, **kwargs)


def _hand_over(groups: Iterable, params: list, prompts: list[int], drafts: list[int] | None = None) -> None:
    """Pass the slots of a step's requests to our metadata builders.

    Args:
        groups: attention groups, those of other backends among them.
        params: sampling parameters of each request, or None.
        prompts: tokens of each prompt.
        drafts: drafts of each request, 0 or -1 for a chunk of a prompt, None in a step without drafts.
    """
    for builder in (builder for group in groups for builder in group.metadata_builders):
        if hasattr(builder, "take_requests"):
            builder.take_requests(params, prompts, drafts)
