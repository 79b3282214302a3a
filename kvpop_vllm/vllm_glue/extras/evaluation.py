"""Evaluation backend for `kvpop eval` that runs vLLM in this process.

Policies are set as a user sets them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvpop_vllm.cache.accounting import dense_request_bytes
from kvpop_vllm.config import ADDITIONAL_CONFIG_KEY, ConfigError
from kvpop_vllm.evaluation.backends import GREEDY, Backend, Run
from kvpop_vllm.evaluation.policies import ResolvedPolicy
from kvpop_vllm.evaluation.runner import DENSE_BLOCK
from kvpop_vllm.model_shape import ModelShape, borrows_channel, positions_of, read_model_config
from kvpop_vllm.requests import SEED
from kvpop_vllm.vllm_glue.extras.inspector import Row, held_by_layer

SPARE_BYTES = 32 << 20
"""KV memory beyond two dense requests: state blocks, and the block that vLLM never hands out."""
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


class EngineBackend(Backend):
    """Evaluation backend that starts one eager engine for each policy and budget.

    It takes the hidden states that predictions are made from where the model passes them to vLLM's runner,
    and computes logits with the model's own output layer. Divergences therefore cover the whole vocabulary.

    Args:
        model: folder of the model.
        dtype: dtype of weights and cache.
        longest: maximum tokens of a request, answer included.
        requests: requests that run at once in :meth:`EngineRun.generate`.
    """

    def __init__(self, model: str, dtype: torch.dtype, longest: int, requests: int = 1):
        if borrows_channel(model):
            raise ConfigError(
                f"{model} gives up a query channel (DMS), which stock vLLM attends with, so there is no dense model to compare with: leave"
                " --backend vllm out"
            )
        super().__init__(model, dtype, longest, requests)
        self.model = model
        self.room = min(self.longest + 1, positions_of(read_model_config(model)) or self.longest + 1)

    @contextmanager
    def start(self, resolved: ResolvedPolicy | None) -> Iterator[EngineRun]:
        """Start an engine. See :class:`kvpop_vllm.evaluation.backends.Backend`."""
        llm = self._engine({} if resolved is None else {ADDITIONAL_CONFIG_KEY: resolved.settings})
        draws = resolved is not None and resolved.policy.draws
        try:
            yield EngineRun(llm, self.room - 1, {SEED: resolved.spec.seed} if draws else {})
        finally:
            llm.llm_engine.engine_core.shutdown()

    def _engine(self, additional: dict):
        before = os.environ.get(IN_PROCESS)
        os.environ[IN_PROCESS] = "0"
        try:
            options = {"enable_prefix_caching": False, "additional_config": additional}
            return start_engine(self.model, self.shape, self.dtype, self.room, self.requests, **options)
        finally:
            if before is None:
                del os.environ[IN_PROCESS]
            else:
                os.environ[IN_PROCESS] = before


def start_engine(model: str, shape: ModelShape, dtype: torch.dtype, longest: int, requests: int, **options):
    """Return an eager ``vllm.LLM`` that takes and returns token ids, with memory for dense requests.

    Args:
        model: folder of the model.
        shape: shape of the model.
        dtype: dtype of weights and cache.
        longest: most tokens of a request, answer included.
        requests: requests that run at once.
        options: further arguments of the engine.
    """
    from vllm import LLM

    sizes = shape.model_layers, shape.num_kv_heads, shape.head_dim
    request = dense_request_bytes(*sizes, dtype, longest, DENSE_BLOCK)
    return LLM(
        str(model),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=longest,
        max_num_seqs=requests,
        kv_cache_memory_bytes=(requests + 1) * request.allocated + SPARE_BYTES,
        enforce_eager=True,
        skip_tokenizer_init=True,
        **options,
    )


class EngineRun(Run):
    """Requests on one engine. See :class:`kvpop_vllm.evaluation.backends.Run`.

    Args:
        llm: the engine.
        longest: maximum tokens of a prompt.
        request_keys: keys of each request (:mod:`kvpop_vllm.requests`).
    """

    def __init__(self, llm, longest: int, request_keys: dict):
        self.llm, self.longest, self.request_keys = llm, longest, request_keys
        self.steps, self.records, self.watched, self.caches = [], False, None, None

        def step(module, inputs, hidden):
            if not self.records:
                return
            self.steps.append(hidden.detach().clone())
            if self.watched is not None and sum(map(len, self.steps)) == self.watched:
                self.caches = self._held(self.watched)

        llm.apply_model(lambda model: model.register_forward_hook(step) and None)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of a prompt. See :class:`kvpop_vllm.evaluation.backends.Run`."""
        self._read(tokens)
        hidden_states = torch.cat(self.steps)
        if len(hidden_states) != len(tokens):
            raise RuntimeError(f"vLLM handed over {len(hidden_states)} hidden states for {len(tokens)} tokens")
        return hidden_states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states in float32. See :class:`kvpop_vllm.evaluation.backends.Run`."""
        (logits,) = self.llm.apply_model(lambda model: model.compute_logits(hidden))
        return logits.float()

    def generate(self, prompts, new, stop, sampling=GREEDY, seeds=None) -> list[list[int]]:
        """Return answers without their stop tokens. See :class:`kvpop_vllm.evaluation.backends.Run`."""
        answers = self._answers(prompts, new, stop, sampling, range(len(prompts)) if seeds is None else seeds)
        return [answer[:-1] if answer and answer[-1] in stop else answer for answer in answers]

    def held(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the held tokens of a prompt. See :class:`kvpop_vllm.evaluation.backends.Run`.

        The last token of a prompt that fills the model is left out, because the engine needs room for an
        answer of one token.

        Raises:
            RuntimeError: no step of the engine ended with the prompt's last token.
        """
        tokens = tokens[: self.longest]
        self.watched, self.caches = len(tokens), None
        try:
            self._read(tokens)
        finally:
            self.watched = None
        if self.caches is None:
            raise RuntimeError(f"no step of vLLM's ended with the prompt's {len(tokens)} tokens")
        return self.caches

    def _held(self, length: int) -> torch.Tensor:
        """Return which of its tokens the only request of the running step holds, ``[layers, H, length]``."""
        engine = self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        row = Row.of(scheduler, scheduler.running[0], length)
        layers = {layer: tensor for layer, _, (tensor,) in held_by_layer(engine, [row])}
        return torch.stack([layers[layer] for layer in sorted(layers)])

    def _read(self, tokens: torch.Tensor) -> None:
        """Run a prompt and record its hidden states."""
        self.steps.clear()
        self.records = True
        try:
            self._answers([tokens.tolist()], 1, (), GREEDY, [0])
        finally:
            self.records = False

    def _answers(self, prompts, new: int, stop, sampling, seeds) -> list[list[int]]:
        from vllm import SamplingParams

        shared = {
            "stop_token_ids": sorted(stop),
            "ignore_eos": True,
            "detokenize": False,
            "extra_args": self.request_keys,
        }
        options = [SamplingParams(**sampling._asdict(), seed=seed, max_tokens=new, **shared) for seed in seeds]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in self.llm.generate(requests, options, use_tqdm=False)]
