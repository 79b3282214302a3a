"""Interface of a model that runs under a policy, and its implementation in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from kvpop_vllm.config import protected_tokens
from kvpop_vllm.distill.hook import borrow_channel, load_model, show_hidden_states
from kvpop_vllm.distill.run import default_device
from kvpop_vllm.evaluation.policies import ResolvedPolicy
from kvpop_vllm.evaluation.served import DenseRequest, Request
from kvpop_vllm.policies.base import ModelShape
from kvpop_vllm.scorers.init import borrows_channel


class Run(Protocol):
    """Model under one policy and budget, or dense; every call is a request of its own."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states ``[S, E]`` of a prompt ``[S]``."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, V]`` float32 over the whole vocabulary for hidden states ``[n, E]``."""

    def generate(self, prompt: list[int], new: int, stop: set[int]) -> list[int]:
        """Return at most ``new`` greedy tokens; the answer ends before a token of ``stop``."""


class Backend(Protocol):
    """Engine that runs models under policies.

    Attributes:
        shape: the model as policies see it.
        dtype: dtype that it computes with.
    """

    shape: ModelShape
    dtype: torch.dtype

    def __init__(self, model: str, dtype: torch.dtype, longest: int): ...

    def start(self, resolved: ResolvedPolicy | None) -> AbstractContextManager[Run]:
        """Start a run under a policy, or dense for None; one run at a time."""

    def held(self, resolved: ResolvedPolicy, tokens: torch.Tensor) -> torch.Tensor:
        """Return which tokens of a prompt ``[S]`` are held at its end, ``[layers, H, S]`` booleans.

        A backend that cannot run as many tokens returns fewer.
        """


class TransformersBackend:
    """Backend that runs the model in transformers.

    Policies run on the kernels of serving, prompts by ``prefill_chunk`` and generated tokens by
    ``decode_step``. Dense attention is torch's own. A model that gives up a query channel (DMS) is without it
    under any policy.

    Args:
        model: folder of the model.
        dtype: dtype of weights and cache.
        longest: maximum tokens of a request, answer included.
    """

    def __init__(self, model: str, dtype: torch.dtype, longest: int):
        self.shape, self.dtype, self.longest = ModelShape.of(model, longest), dtype, longest
        self.model = load_model(model, dtype).eval().to(default_device())
        show_hidden_states(self.model)
        if borrows_channel(model):
            borrow_channel(self.model)

    @contextmanager
    def start(self, resolved: ResolvedPolicy | None) -> Iterator[TransformersRun]:
        """Start a run; see :meth:`Backend.start`."""
        yield TransformersRun(self, resolved)

    def held(self, resolved: ResolvedPolicy, tokens: torch.Tensor) -> torch.Tensor:
        """Return the held tokens of a prompt; see :meth:`Backend.held`."""
        with self.start(resolved) as run:
            return run.held(tokens)


class TransformersRun:
    """Requests of a model in transformers; see :class:`Run`."""

    def __init__(self, backend: TransformersBackend, resolved: ResolvedPolicy | None):
        self.model, self.longest, self.resolved = backend.model, backend.longest, resolved
        self.device = next(self.model.parameters()).device

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of a prompt; see :meth:`Run.hidden`."""
        return self._forward(tokens, self._request(len(tokens)), 0)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states; see :meth:`Run.logits`."""
        return self.model.get_output_embeddings()(hidden).float()

    def generate(self, prompt: list[int], new: int, stop: set[int]) -> list[int]:
        """Return greedy tokens; see :meth:`Run.generate`."""
        request, found, tokens = self._request(len(prompt)), [], prompt
        for seen in range(len(prompt), len(prompt) + new):
            hidden = self._forward(torch.tensor(tokens), request, seen - len(tokens))
            token = int(self.logits(hidden[-1:]).argmax())
            if token in stop:
                break
            found.append(token)
            tokens = [token]
        return found

    def held(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the held tokens of a prompt; see :meth:`Backend.held`."""
        request = self._request(len(tokens))
        self._forward(tokens, request, 0)
        return request.held()

    def _request(self, prompt: int) -> Request | DenseRequest:
        if self.resolved is None:
            return DenseRequest()
        return Request(self.resolved, length=self.longest, protected=protected_tokens(self.resolved.protect, prompt))

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, request, start: int) -> torch.Tensor:
        """Return hidden states ``[L, E]`` of a request's next tokens, the first at position ``start``."""
        positions = torch.arange(start, start + len(tokens), device=self.device)[None]
        inputs = {"input_ids": tokens.to(self.device)[None], "position_ids": positions}
        return self.model.get_decoder()(**inputs, attend=request).last_hidden_state[0]
