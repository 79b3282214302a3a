"""Admission of requests at the front end of an engine: what a request asks of its cache is checked and resolved."""

import functools
import inspect

from vllm.exceptions import VLLMValidationError

from kvpop_vllm.config import ConfigError
from kvpop_vllm.requests import RESOLVED
from kvpop_vllm.vllm_glue.extras.cartridge_names import SALT, NamedCartridge, begin_of_prompt, prepend, resolved
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy, requested


def process_inputs(original, self, *args, **kwargs):
    """Wrap the making of an engine's request from a prompt and sampling parameters.

    Raises:
        VLLMValidationError: the request asks for what it cannot have.
    """
    if not requested(self.vllm_config):
        return original(self, *args, **kwargs)
    if kwargs.get("resumable"):
        policy = engine_policy(self.vllm_config).name
        raise ConfigError(
            f"streaming-input requests rewind the sequence, which --kv-policy {policy} cannot: send the whole prompt at once"
        )
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    adapter = bound.arguments.get("lora_request")
    if isinstance(adapter, NamedCartridge):
        bound.arguments["lora_request"] = None
    request = original(*bound.args, **bound.kwargs)
    params = request.sampling_params
    if params is None:
        return request
    if (request.cache_salt or "").startswith(SALT):
        raise VLLMValidationError(f"cache_salt must not begin with {SALT!r}: choose another")
    prompt = request.prompt_embeds if request.prompt_token_ids is None else request.prompt_token_ids
    ids = range(len(prompt)) if request.prompt_token_ids is None else prompt
    begin = functools.partial(begin_of_prompt, bound.arguments["prompt"], ids, self.tokenizer)
    slots, head = resolved(self.vllm_config, params, ids, adapter, begin)
    params.extra_args = {**(params.extra_args or {}), RESOLVED: list(slots)}  # the old one belongs to the caller
    if slots.cartridges:
        prepend(request, slots, len(head), self.vllm_config.model_config.max_model_len)
    return request


def generate(original, self, prompt, sampling_params, *args, **kwargs):
    """Wrap the making of an answer's generator, to refuse a request before its answer begins."""
    adapter = kwargs.get("lora_request")
    if requested(self.vllm_config) and (adapter or getattr(sampling_params, "extra_args", None)):
        tokens = (prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None) or ()
        begin = functools.partial(begin_of_prompt, prompt, tokens, self.renderer.tokenizer)
        resolved(self.vllm_config, sampling_params, tokens, adapter, begin)
    return original(self, prompt, sampling_params, *args, **kwargs)
