"""Measures of several policies on the same rows of text (`kvpop eval`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from kvpop_vllm.cache.accounting import request_bytes
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.hook import GateInputs
from kvpop_vllm.distill.sparse import dense_attention
from kvpop_vllm.evaluation.policies import PolicySpec, ResolvedPolicy
from kvpop_vllm.evaluation.recall import Judge
from kvpop_vllm.evaluation.replay import token_measures
from kvpop_vllm.evaluation.served import Served
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.policies.base import ModelShape
from kvpop_vllm.scorers.init import shape_of

KEYS = ("length", "budget", "equal", "window", "topk", "policy")
"""Fields that identify a line of a table."""
RECALL = ("teacher", "hindsight", "mass")
"""Measures of :class:`kvpop_vllm.evaluation.recall.Recall`."""


@dataclass(frozen=True)
class Setting:
    """Length S and budget B = s + w + k at which policies are compared.

    Attributes:
        length: S in tokens.
        budget: B in tokens per KV head.
        sinks: s; None for each policy's own.
        window: w; None for each policy's own.
        equal: ``k`` or ``bytes``, whichever is equal between policies.
    """

    length: int
    budget: int
    sinks: int | None
    window: int | None
    equal: str = "k"

    @property
    def positions(self) -> list[int]:
        """Positions of the queries for recall: S / 2 (or B) and 3 S / 4."""
        return [min(q, self.length - 2) for q in (max(self.length // 2, self.budget), 3 * self.length // 4)]

    def resolve(self, spec: PolicySpec, model: ModelShape, dtype: torch.dtype) -> ResolvedPolicy:
        """Return a spec with this budget, or with the largest one of as many bytes.

        At equal bytes, its pages take no more than a stateless policy's with this budget.

        Raises:
            ConfigError: no long-range slots are left, or the policy cannot be used with these settings.
        """
        resolved = self._deploy(spec, model, self.budget)
        if self.equal == "k":
            return resolved
        plain = PageLayout(model.num_kv_heads, model.head_dim, dtype)
        most = request_bytes(plain, model.num_layers, self.length, resolved.policy.retention).allocated
        too_many = self.budget + 1
        # first whole pages, then single tokens
        while resolved.request_bytes(self.length, dtype).allocated > most:
            too_many = resolved.roles.budget
            resolved = self._deploy(spec, model, plain.block_slots * (cdiv(too_many, plain.block_slots) - 1))
        fits = resolved
        while too_many <= self.budget and too_many - fits.roles.budget > 1:
            between = self._deploy(spec, model, (fits.roles.budget + too_many) // 2)
            if between.request_bytes(self.length, dtype).allocated <= most:
                fits = between
            else:
                too_many = between.roles.budget
        return fits

    def _deploy(self, spec: PolicySpec, model: ModelShape, budget: int) -> ResolvedPolicy:
        sinks, window = self.sinks or 0, self.window or 1
        if budget - sinks - window < 1:
            less = f" ({max(0, budget)} in as many bytes for {self.length} tokens)" if budget < self.budget else ""
            raise ConfigError(
                f"a budget of {self.budget}{less} leaves {spec.name} no long-range tokens: {sinks} sinks, window"
                f" {window}: raise --budget or --length"
            )
        return spec.resolve(model, budget, self.sinks, self.window)


def evaluate(
    model: nn.Module,
    rows: Iterable[torch.Tensor],
    specs: list[PolicySpec],
    settings: list[Setting],
    *,
    recall: bool = True,
) -> Iterator[dict]:
    """Yield one record per row of text, setting and policy, and one per row and length for ``dense``.

    Recall is taken on the dense model's keys and queries, so that all policies are judged on the same.
    Cross-entropy and accuracy are taken with each policy in all layers, on the kernels of serving.

    Args:
        model: from :func:`kvpop_vllm.distill.hook.load_model`.
        rows: ``[S]`` tokens, each at least as long as the longest setting; the first ``length`` tokens are
            used.
        specs: policies to compare.
        settings: lengths and budgets to compare them at.
        recall: True to take recall (the teacher's pass costs more than everything else).

    Yields:
        Records with ``row, length, budget, equal, window, topk, policy``, nll (nats per token) and accuracy
        (of the next token). For policies also: kl, the divergence ``KL(dense || policy)`` of their
        predictions in nats per token; teacher, hindsight and mass, means over layers and heads (not if
        budgets are uneven); error, the relative error of attention outputs on the dense model's queries, keys
        and values from position B on. ``*_by_layer`` are lists of layers of heads.
    """
    dtype, device = next(model.parameters()).dtype, next(model.parameters()).device
    sizes = shape_of(model.config.get_text_config().to_dict(), "the model's config")
    for number, row in enumerate(rows):
        for length in sorted({s.length for s in settings}):
            tokens = row[None, :length].to(device)
            here = [s for s in settings if s.length == length]
            shape = ModelShape(**sizes, max_model_len=length)
            pairs = [(s, s.resolve(c, shape, dtype)) for s in here for c in specs]
            for _, resolved in pairs:
                resolved.check_channel(model)
            observer = _Observer(pairs, recall)
            base = {"row": number, "length": length}
            quality, dense = _next_token(model, tokens, observer)
            yield base | {"policy": "dense"} | quality
            for i, (setting, resolved) in enumerate(pairs):
                names = described(setting, resolved)
                quality, _ = _next_token(model, tokens, Served(resolved), dense)
                yield base | names | quality | observer.record(i)


def described(setting: Setting, resolved: ResolvedPolicy) -> dict:
    """Return the fields of a record that describe a policy, beside its length."""
    roles = resolved.roles
    return {
        "budget": setting.budget,
        "whole": resolved.whole,
        "equal": setting.equal,
        "topk": roles.topk,
        "policy": resolved.spec.name,
        "protect": "all" if resolved.protect is True else int(resolved.protect),
        "window": roles.window,
    }


class _Observer(GateInputs):
    """Dense attention that records recall and output error of every setting and policy, layer by layer."""

    def __init__(self, pairs, recall: bool):
        super().__init__()
        self.pairs, self.recall = pairs, recall
        self.layers: list[list] = [[] for _ in pairs]

    def __call__(self, layer, q, k, v, scale):
        out, lse = dense_attention(q, k, v, scale)
        judge, signals = Judge(q, k, lse, scale), self.signals(layer, k, v)
        for found, (setting, resolved) in zip(self.layers, self.pairs, strict=True):
            positions = setting.positions if self.recall else []
            recall, own = resolved.on_dense(judge, layer, v, positions, signals)
            found.append((recall, _output_error(own, out, resolved.roles.budget)))
        return out

    def record(self, i: int) -> dict:
        """Return the recorded measures of pair i."""
        found, known = {}, all(recall is not None for recall, _ in self.layers[i])
        for name in RECALL if known else ():
            values = torch.stack([getattr(recall, name) for recall, _ in self.layers[i]])
            found |= {name: values.mean().item(), f"{name}_by_layer": values.tolist()}
        errors = torch.stack([error for _, error in self.layers[i]])
        return found | {"error": errors.mean().item(), "error_by_layer": errors.tolist()}


def _output_error(out: torch.Tensor, exact: torch.Tensor, first: int) -> torch.Tensor:
    """Return ``|out - exact| / |exact|`` of attention outputs, ``[Hq]``.

    Args:
        out: ``[B, Hq, S, D]``.
        exact: ``[B, Hq, S, D]``.
        first: the mean is over sequences and the queries from this position on.
    """
    out, exact = out[:, :, first:].float(), exact[:, :, first:].float()
    return ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean(dim=(0, 2))


@torch.inference_mode()
def _next_token(model, tokens, attend, dense=None) -> tuple[dict[str, float], torch.Tensor]:
    """Return the quality of next-token predictions, and their hidden states ``[S - 1, E]``.

    With hidden states of the ``dense`` model, the quality includes the divergence from its predictions.
    """
    hidden = model.get_decoder()(input_ids=tokens, attend=attend).last_hidden_state[0, :-1]
    head = model.get_output_embeddings()
    found = token_measures(lambda states: head(states).float(), hidden, tokens[0], dense)
    return {name: found[name].mean().item() for name in ("nll", "accuracy", "kl") if name in found}, hidden


def summarise(records: list[dict]) -> list[dict]:
    """Return means over rows: one record per length, budget, window, equality and policy.

    ``perplexity = exp(mean nll)``.
    """
    table = []
    for line, members in grouped(records, KEYS):
        line |= {"rows": len(members)}
        for name in ("nll", "accuracy", *RECALL, "error", "kl"):
            if all(name in member for member in members):
                line[name] = sum(m[name] for m in members) / len(members)
        table.append(line | {"perplexity": math.exp(line["nll"])})
    return table


def grouped(records: list[dict], keys: tuple[str, ...]) -> Iterator[tuple[dict, list[dict]]]:
    """Yield each combination of values of ``keys``, in order of appearance, with the records that have it."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(name) for name in keys), []).append(record)
    for key, members in groups.items():
        yield dict(zip(keys, key, strict=True)), members
