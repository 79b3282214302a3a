"""Interface of an engine that runs a model under policies, and its implementation in transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from transformers import DynamicCache

from kvpop_vllm.distill.hook import Dense, borrow_channel, load_model, show_hidden_states
from kvpop_vllm.distill.run import default_device
from kvpop_vllm.evaluation.policies import ResolvedPolicy
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.policies.base import ModelShape
from kvpop_vllm.scorers.init import borrows_channel


class Run(ABC):
    """Model under one policy and budget, or dense; every call is a request of its own."""

    @abstractmethod
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states ``[S, E]`` of a prompt ``[S]``."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, V]`` float32 over the whole vocabulary for hidden states ``[n, E]``."""

    @abstractmethod
    def generate(self, prompt: list[int], new: int, stop: set[int]) -> list[int]:
        """Return at most ``new`` greedy tokens; the answer ends before a token of ``stop``."""

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

    Attributes:
        shape: the model as policies see it.
    """

    def __init__(self, model: str, dtype: torch.dtype, longest: int):
        self.shape, self.dtype, self.longest = ModelShape.of(model, longest), dtype, longest

    @abstractmethod
    def start(self, resolved: ResolvedPolicy | None) -> AbstractContextManager[Run]:
        """Start a run under a policy, or dense for None; one run at a time."""

    def held(self, resolved: ResolvedPolicy, tokens: torch.Tensor) -> torch.Tensor:
        """Return which tokens of a prompt are held at its end; see :meth:`Run.held`."""
        with self.start(resolved) as run:
            return run.held(tokens)


class TransformersBackend(Backend):
    """Backend that runs the model in transformers.

    Policies run in a :class:`kvpop_vllm.hf.KVpopCache` on the CPU's kernels, dense attention is torch's own. A
    model that gives up a query channel (DMS) is without it under any policy.
    """

    def __init__(self, model: str, dtype: torch.dtype, longest: int):
        super().__init__(model, dtype, longest)
        self.model = load_model(model, dtype).eval().to(default_device())
        show_hidden_states(self.model)
        if borrows_channel(model):
            borrow_channel(self.model)

    @contextmanager
    def start(self, resolved: ResolvedPolicy | None) -> Iterator[TransformersRun]:
        """Start a run; see :meth:`Backend.start`.

        Raises:
            ConfigError: the model cannot run under the policy.
        """
        cache = None
        if resolved is not None:
            resolved.check_channel(self.model)
            sizes = {"max_length": self.longest, "seed": resolved.spec.seed, "prompt": resolved.spec.prompt}
            cache = KVpopCache(self.model, **resolved.settings, **sizes, device="cpu")
        yield TransformersRun(self.model, cache)


class TransformersRun(Run):
    """Requests of a model in transformers, in a cache of fixed size or dense for None; see :class:`Run`."""

    def __init__(self, model: torch.nn.Module, cache: KVpopCache | None):
        self.model, self.cache = model, cache
        self.device = next(model.parameters()).device

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of a prompt; see :meth:`Run.hidden`."""
        return self._forward(tokens, self._request(), 0)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states; see :meth:`Run.logits`."""
        return self.model.get_output_embeddings()(hidden).float()

    def generate(self, prompt: list[int], new: int, stop: set[int]) -> list[int]:
        """Return greedy tokens; see :meth:`Run.generate`."""
        request, answer, tokens = self._request(), [], prompt
        for seen in range(len(prompt), len(prompt) + new):
            hidden = self._forward(torch.tensor(tokens), request, seen - len(tokens))
            token = int(self.logits(hidden[-1:]).argmax())
            if token in stop:
                break
            answer.append(token)
            tokens = [token]
        return answer

    def held(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the held tokens of a prompt; see :meth:`Run.held`."""
        self.hidden(tokens)
        return self.cache.held()

    def _request(self) -> dict:
        """Return the decoder's arguments for the passes of a new request."""
        if self.cache is None:
            return {"past_key_values": DynamicCache(), "attend": Dense()}
        self.cache.reset()
        return {"past_key_values": self.cache}

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, request: dict, start: int) -> torch.Tensor:
        """Return hidden states ``[L, E]`` of a request's next tokens, the first at position ``start``."""
        positions = torch.arange(start, start + len(tokens), device=self.device)[None]
        inputs = {"input_ids": tokens.to(self.device)[None], "position_ids": positions}
        return self.model.get_decoder()(**inputs, **request).last_hidden_state[0]
