"""Interface of an engine that runs a model under policies, and its implementation in transformers.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from transformers import DynamicCache
from transformers.generation import TopPLogitsWarper

from kvpop_vllm.distill.run import default_device
from kvpop_vllm.evaluation.policies import ResolvedPolicy
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.hf.devices import kernel_device
from kvpop_vllm.model_hook import CACHE_NAME, LOCAL, Dense, borrow_channel, decoder_of, load_model, show_hidden_states
from kvpop_vllm.model_shape import ModelShape, borrows_channel, kinds_of
from kvpop_vllm.supported import FULL


class Sampling(NamedTuple):
    """Sampling of generated tokens.

    Attributes:
        temperature: 0 for greedy decoding.
        top_p: share of the probability from which tokens are drawn, most likely ones first.
    """

    temperature: float = 0.0
    top_p: float = 1.0


GREEDY = Sampling()


class Run(ABC):
    """Model under one policy and budget, or dense. Every call is a request of its own."""

    @abstractmethod
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states ``[S, E]`` of a prompt ``[S]``."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, V]`` float32 over the whole vocabulary for hidden states ``[n, E]``."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[list[int]],
        new: int,
        stop: set[int],
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Return an answer of at most ``new`` tokens to each prompt. It ends before a token of ``stop``.

        Args:
            prompts: token ids. Each prompt is a request of its own.
            new: maximum tokens of an answer.
            stop: token ids.
            sampling: see :class:`Sampling`.
            seeds: seed of each prompt's draws, None for 0, 1, 2, ...
        """

    @abstractmethod
    def held(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which tokens of a prompt ``[S]`` are held at its end, ``[layers, H, S]`` booleans.

        An engine that cannot run as many tokens returns fewer.
        """


class Backend(ABC):
    """Engine that runs a model under policies.

    Args:
        model: folder of the model.
        dtype: dtype of weights and cache.
        longest: maximum tokens of a request, answer included.
        requests: requests that run at once in :meth:`Run.generate`.

    Attributes:
        shape: the model as policies see it.
    """

    def __init__(self, model: str, dtype: torch.dtype, longest: int, requests: int = 1):
        self.shape, self.dtype = ModelShape.in_context(model, longest), dtype
        self.longest = self.shape.max_model_len
        self.requests = requests

    @abstractmethod
    def start(self, resolved: ResolvedPolicy | None) -> AbstractContextManager[Run]:
        """Start a run under a policy, or dense for None. One run at a time."""

    def held(self, resolved: ResolvedPolicy, tokens: torch.Tensor) -> torch.Tensor:
        """Return which tokens of a prompt are held at its end. See :meth:`Run.held`."""
        with self.start(resolved) as run:
            return run.held(tokens)


class TransformersBackend(Backend):
    """Backend that runs the model in transformers.

    Policies run in a :class:`kvpop_vllm.hf.KVpopCache`, dense attention is torch's own. Where the model's device has no
    kernels for a policy, the cache is on the CPU. A model that gives up a query channel (DMS) is without it under any
    policy.
    """

    def __init__(self, model: str, dtype: torch.dtype, longest: int, requests: int = 1):
        super().__init__(model, dtype, longest, requests)
        self.model = load_model(model, dtype).eval().to(default_device())
        show_hidden_states(self.model)
        if borrows_channel(model):
            borrow_channel(self.model)

    @contextmanager
    def start(self, resolved: ResolvedPolicy | None) -> Iterator[TransformersRun]:
        """Start a run. See :meth:`Backend.start`."""
        cache = None
        if resolved is not None:
            resolved.check_channel(self.model)
            sizes = {"max_length": self.longest, "seed": resolved.spec.seed, "prompt": resolved.spec.prompt}
            # layers differ in what they keep, not in whether there are kernels for it
            keys = next(self.model.parameters()).new_empty(0, resolved.model.head_dim)
            device = kernel_device(keys, resolved.rules[0])
            cache = KVpopCache(self.model, **resolved.settings, **sizes, device=device)
        yield TransformersRun(self.model, cache, self.requests)


class TransformersRun(Run):
    """Requests of a model in transformers, in a cache of fixed size or dense for None. See :class:`Run`."""

    def __init__(self, model: torch.nn.Module, cache: KVpopCache | None, requests: int):
        self.model, self.cache, self.requests = model, cache, requests
        self.device = next(model.parameters()).device

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of a prompt. See :meth:`Run.hidden`."""
        return self._forward(tokens[None], self._request(), 0)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states. See :meth:`Run.logits`."""
        return self.model.get_output_embeddings()(hidden).float()

    def generate(self, prompts, new, stop, sampling=GREEDY, seeds=None) -> list[list[int]]:
        """Return answers. See :meth:`Run.generate`. Prompts of one length run together, without padding."""
        # without pads a row's answer does not depend on the others of its batch
        by_length: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(number)
        answers, seeds = {}, range(len(prompts)) if seeds is None else seeds
        for group in by_length.values():
            for a in range(0, len(group), self.requests):
                batch = group[a : a + self.requests]
                tokens = torch.tensor([prompts[number] for number in batch])
                batch_answers = self._answers(tokens, new, stop, sampling, [seeds[number] for number in batch])
                answers |= dict(zip(batch, batch_answers, strict=True))
        return [answers[number] for number in range(len(prompts))]

    def _answers(self, prompts: torch.Tensor, new: int, stop: set[int], sampling, seeds) -> list[list[int]]:
        """Return the answers to prompts ``[R, L]``. Rows that have ended go on until all have, unread."""
        request, tokens, columns = self._request(), prompts, []
        # one generator each, so that a request's draws do not depend on its batch
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        for length in range(prompts.shape[1], prompts.shape[1] + new):
            hidden = self._forward(tokens, request, length - tokens.shape[1])
            tokens = choose(self.logits(hidden[:, -1]).cpu(), sampling, draws).unsqueeze(1)
            columns.append(tokens)
            # ended rows stay in the batch, since the cache of a policy drops no rows
            ended |= torch.isin(tokens[:, 0], torch.tensor(sorted(stop), dtype=torch.int64))
            if ended.all():
                break
        rows = torch.cat(columns, 1).tolist()
        return [row[: next((i for i, token in enumerate(row) if token in stop), None)] for row in rows]

    def held(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the held tokens of a prompt. See :meth:`Run.held`."""
        self.hidden(tokens)
        return self.cache.held()

    def _request(self) -> dict:
        """Return the decoder's arguments for the passes of a new request."""
        if self.cache is None:
            # recurrent layers need a cache of their kind, which transformers chooses by the config
            options = {"config": self.model.config} if {*kinds_of(self.model.config)} - {FULL, *LOCAL} else {}
            return {CACHE_NAME: DynamicCache(**options), "attend": Dense()}
        self.cache.reset()
        return {CACHE_NAME: self.cache}

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, request: dict, start: int) -> torch.Tensor:
        """Return hidden states ``[R, L, E]`` of the next tokens ``[R, L]``, the first at position ``start``."""
        positions = torch.arange(start, start + tokens.shape[1], device=self.device).expand(tokens.shape)
        inputs = {"input_ids": tokens.to(self.device), "position_ids": positions}
        return decoder_of(self.model)(**inputs, **request).last_hidden_state


def choose(logits: torch.Tensor, sampling: Sampling, draws: list[torch.Generator]) -> torch.Tensor:
    """Return the next token of each row, ``[R]``.

    Args:
        logits: ``[R, V]``.
        sampling: see :class:`Sampling`.
        draws: generator of each row.
    """
    if not sampling.temperature:
        return logits.argmax(-1)
    logits = TopPLogitsWarper(sampling.top_p)(None, logits / sampling.temperature)
    chances = logits.softmax(-1)
    return torch.cat([row.multinomial(1, generator=draw) for row, draw in zip(chances, draws, strict=True)])
