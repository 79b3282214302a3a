"""Divergence of rows under a policy, on the kernels of serving."""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvpop_vllm.calibrate.layers import POSITIONS
from kvpop_vllm.calibrate.records import Records
from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.policies import PolicySpec, ResolvedPolicy
from kvpop_vllm.evaluation.serving_kernels import Served
from kvpop_vllm.model_hook import Dense, decoder_of
from kvpop_vllm.model_shape import ModelShape


class Choice(NamedTuple):
    """A policy as it is compared.

    Attributes:
        policy: name of the policy.
        budget: B.
        window: w, None for the policy's own.
        shares: name of a table of shares, ``equal`` for none.
    """

    policy: str
    budget: int
    window: int | None
    shares: str


EQUAL = "equal"
SEARCH = "search"
"""Name of the rows that shares are searched on."""
DENSE_BYTES = 1 << 28
"""Most bytes of the dense predictions of the rows of a search that are kept."""


class Passes:
    """Passes of a model over rows of text under policies; what was measured is kept.

    Args:
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        shape: the model as policies see it.
        specs: the policies by name.
        protect: True to protect the prompts of rows.
        stride: every so many predictions of a row are compared.
        records: where measurements are kept.

    Attributes:
        tables: tables of shares ``[layers, H]`` that choices may name.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        shape: ModelShape,
        specs: dict[str, PolicySpec],
        protect: bool,
        stride: int,
        records: Records,
    ):
        self.model, self.shape, self.specs, self.protect = model, shape, specs, protect
        self.stride, self.records = stride, records
        self.tables: dict[str, torch.Tensor] = {}
        self._dense: dict[int, tuple[torch.Tensor, float]] = {}

    def resolve(self, choice: Choice, prompt: int = 0) -> ResolvedPolicy:
        """Return the policy of a choice for rows with a prompt of so many tokens."""
        shares = None if choice.shares == EQUAL else self.tables[choice.shares].tolist()
        settings = {"allocator": "uniform", "shares": shares, "protect": prompt if self.protect else 0}
        return replace(self.specs[choice.policy], **settings).resolve(self.shape, choice.budget, window=choice.window)

    def missing(self, side: str, count: int, choices: Sequence[Choice]) -> int:
        """Return how many passes over rows are still to be made."""
        return sum(self._key(side, row, choice) not in self.records for row in range(count) for choice in choices)

    def _key(self, side: str, number: int, choice: Choice) -> list:
        """Return the key of a measurement, with a hash of the shares: another search may give a table of the same name."""
        table = [] if choice.shares == EQUAL else self.tables[choice.shares].tolist()
        return [side, number, *choice, hashlib.sha256(json.dumps(table).encode()).hexdigest()[:12]]

    @torch.inference_mode()
    def over(self, side: str, rows: Sequence, choices: Sequence[Choice], tick) -> list[list[dict]]:
        """Return for each choice the measurements of all rows.

        Args:
            side: name of the rows.
            rows: tokens ``[S]`` and the length of their prompt.
            choices: what to compare.
            tick: called after each pass.

        Returns:
            ``kl``, KL(dense || policy) in nats per token, and ``prefill``, time of the pass over that of the dense model.
        """
        measured: list[list[dict]] = [[] for _ in choices]
        # many rows have prompts of one length
        resolve = cache(self.resolve)
        for number, (tokens, prompt) in enumerate(rows):
            exact = self._dense.get(number) if side == SEARCH else None
            for values, choice in zip(measured, choices, strict=True):
                key = self._key(side, number, choice)
                if key not in self.records:
                    # once for all choices of a row, and not at all if every one is measured
                    exact = exact or self._log_probabilities(tokens, prompt, Dense())
                    # a search comes back to its rows, and reports no times
                    if side == SEARCH and len(rows) * exact[0].nbytes <= DENSE_BYTES:
                        self._dense[number] = exact
                    self.records.put(key, self._against(exact, tokens, prompt, resolve(choice, prompt)))
                    tick()
                values.append(self.records[key])
        return measured

    @torch.inference_mode()
    def prefill(self, tokens: torch.Tensor, prompt: int, choice: Choice) -> float:
        """Return the time of a row's pass under a choice over that of a dense pass. It is not kept."""
        policy = self.resolve(choice, prompt)
        if next(self.model.parameters()).device.type == "cuda":  # a first pass compiles kernels
            self._log_probabilities(tokens, prompt, Served(policy))
        exact = self._log_probabilities(tokens, prompt, Dense())
        return self._against(exact, tokens, prompt, policy)["prefill"]

    def _against(self, exact: tuple, tokens: torch.Tensor, prompt: int, policy: ResolvedPolicy) -> dict:
        """Return the measurement of a row under a policy."""
        inexact, seconds = self._log_probabilities(tokens, prompt, Served(policy))
        losses = F.kl_div(inexact, exact[0], reduction="none", log_target=True).sum(-1)
        kl = float(losses.double().mean())
        if not math.isfinite(kl):
            raise ConfigError(
                f"predictions under {policy.spec.policy} are not finite: choose another policy or --dtype"
            )
        # rounding may make a divergence negative
        return {"kl": max(0.0, kl), "prefill": seconds / exact[1]}

    def _log_probabilities(self, tokens: torch.Tensor, prompt: int, attend) -> tuple[torch.Tensor, float]:
        """Return log-probabilities of a row's predictions after its prompt, and the time of the pass in seconds."""
        device = next(self.model.parameters()).device
        began = _now(device)
        hidden = decoder_of(self.model)(input_ids=tokens[None].to(device), attend=attend).last_hidden_state
        seconds = _now(device) - began
        head = self.model.get_output_embeddings()
        # logits of all positions at once may take more memory than the pass itself
        blocks = hidden[0, prompt : -1 : self.stride].split(POSITIONS)
        return torch.cat([head(part).float().log_softmax(-1) for part in blocks]), seconds


def _now(device: torch.device) -> float:
    """Return the CPU time, which other processes do not lengthen, or with a GPU the time when its work is done."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.monotonic()
