"""Measures of several policies on the same rows of text (`kvpop eval`).

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from kvpop_vllm.cache.accounting import dense_request_bytes, request_bytes
from kvpop_vllm.cache.pages import PageLayout, cdiv
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.sparse_attention import dense_attention
from kvpop_vllm.evaluation.policies import PolicySpec, ResolvedPolicy
from kvpop_vllm.evaluation.recall import Judge
from kvpop_vllm.evaluation.replay import Predictions, token_measures
from kvpop_vllm.evaluation.serving_kernels import Served
from kvpop_vllm.model_hook import Dense, GateInputs, decoder_of
from kvpop_vllm.model_shape import ModelShape

DENSE, OWN = "dense", "dense (own)"
"""Names of the dense model that policies are compared with, and of the evaluated one if that is another."""
DENSE_BLOCK = 128
"""Tokens of a block of vLLM's own cache on a CPU."""
RECALL = ("teacher", "hindsight", "mass")
"""Measures of :class:`kvpop_vllm.evaluation.recall.Recall`."""


@dataclass(frozen=True)
class Setting:
    """Length S and budget B = s + w + k at which policies are compared.

    Attributes:
        length: S in tokens.
        budget: B in tokens per KV head.
        sinks: s, None for each policy's own.
        window: w, None for each policy's own.
        equal: ``k`` or ``bytes``, whichever is equal between policies.
        prompt: tokens of a request's prompt, None if all are.
    """

    length: int
    budget: int
    sinks: int | None
    window: int | None
    equal: str = "k"
    prompt: int | None = None

    @property
    def positions(self) -> list[int]:
        """Positions of the queries for recall: S / 2 and 3 S / 4, each at least B."""
        return [min(max(q, self.budget), self.length - 2) for q in (self.length // 2, 3 * self.length // 4)]

    def resolve(self, spec: PolicySpec, model: ModelShape, dtype: torch.dtype) -> ResolvedPolicy:
        """Return a spec with this budget, or with the largest one of as many bytes.

        At equal bytes, its pages take no more than a stateless policy's with this budget and the same protection.
        """
        resolved = self._deploy(spec, model, self.budget)
        if self.equal == "k":
            return resolved
        plain = PageLayout(model.num_kv_heads, model.head_dim, dtype)
        protected = resolved.protected(self.length, self.prompt)
        sizes = model.num_layers, self.length, resolved.policy.retention
        largest = request_bytes(plain, *sizes, protected=protected).allocated
        too_many = self.budget + 1
        # first whole pages, then single tokens
        while resolved.request_bytes(self.length, dtype, self.prompt).allocated > largest:
            too_many = resolved.roles.budget
            resolved = self._deploy(spec, model, plain.block_slots * (cdiv(too_many, plain.block_slots) - 1))
        fits = resolved
        # bisection between a budget that fits and one that does not
        while too_many <= self.budget and too_many - fits.roles.budget > 1:
            between = self._deploy(spec, model, (fits.roles.budget + too_many) // 2)
            if between.request_bytes(self.length, dtype, self.prompt).allocated <= largest:
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


Runs = list[tuple[ResolvedPolicy, list[Setting]]]
"""Policies with their budgets, each with the settings that it is compared at."""


def resolve_all(pairs: Iterable[tuple[PolicySpec, Setting]], shape: ModelShape, dtype: torch.dtype) -> Runs:
    """Return the runs of policies at settings. Settings that mean the same of a policy are one run.

    No model is loaded.
    """
    resolved_settings: dict[tuple, tuple[ResolvedPolicy, list[Setting]]] = {}
    for spec, setting in pairs:
        resolved = setting.resolve(spec, shape, dtype)
        # what the policy resolves to says whether settings mean the same
        key = spec, setting.budget, *resolved.settings.items()
        resolved_settings.setdefault(key, (resolved, []))[1].append(setting)
    return list(resolved_settings.values())


def evaluate(
    model: nn.Module,
    rows: Iterable[torch.Tensor],
    lengths: list[int],
    runs: Runs,
    *,
    recall: bool = True,
    teacher: nn.Module | None = None,
    tick: Callable[[float], object] = lambda passes: None,
) -> Iterator[dict]:
    """Yield records of rows of text: of ``dense``, then of each policy at each of its settings.

    Recall and error are taken on the dense model's keys and queries, so that all policies are judged on the
    same. Cross-entropy and accuracy are taken with each policy in all layers, on the kernels of serving.

    Args:
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        rows: ``[S]`` tokens, each at least as long as the longest length. The first ``length`` tokens are used.
        lengths: lengths S of rows.
        runs: policies to compare, from :func:`resolve_all`.
        recall: True to take recall (the teacher's pass costs more than everything else).
        teacher: model whose predictions are the dense ones, None for ``model`` itself. With a teacher ``model``
            without a policy is ``dense (own)``.
        tick: called with the number of passes that are done. A row has one for each dense model and two for
            each run.

    Yields:
        Records with ``row, length, budget, equal, window, topk, policy``, tokens (predicted ones), nll (nats per
        token) and accuracy (of the next token). For all but ``dense`` also: kl, the divergence
        ``KL(dense || policy)`` of their predictions in nats per token. For policies also: teacher, hindsight and
        mass, means over layers and heads (not if budgets are uneven), and error, the relative error of attention
        outputs on the model's own queries, keys and values from position B on. ``*_by_layer`` are lists of
        layers of heads.
    """
    dtype, device = next(model.parameters()).dtype, next(model.parameters()).device
    # a wrong model is refused here, and not in the middle of the rows
    for resolved, _ in runs:
        resolved.check_channel(model)
    for number, row in enumerate(rows):
        for length in sorted(set(lengths)):
            tokens = row[None, :length].to(device)
            # one dense pass judges all policies at this length
            pairs = [(resolved, [s for s in chosen if s.length == length]) for resolved, chosen in runs]
            pairs = [(resolved, chosen) for resolved, chosen in pairs if chosen]
            base = {"row": number, "length": length}
            exact = None
            if teacher is not None:
                quality, exact = _next_token(teacher, tokens, Dense())
                yield base | {"policy": DENSE} | _dense_size(teacher, length) | quality
                tick(1)
            # outputs of this pass are dense, so that one policy's error in a layer does not reach another's in the next
            observer = _Observer([(chosen[0], resolved) for resolved, chosen in pairs], recall, tick)
            quality, states = _next_token(model, tokens, observer, exact)
            yield base | {"policy": OWN if teacher else DENSE} | _dense_size(model, length) | quality
            tick(1)
            for i, (resolved, chosen) in enumerate(pairs):
                quality, _ = _next_token(model, tokens, Served(resolved), states if exact is None else exact)
                for setting in chosen:
                    yield base | described(setting, resolved, dtype) | quality | observer.record(i)
                tick(1)


def dense_bytes(shape: ModelShape, dtype: torch.dtype, length: int) -> int:
    """Return the allocated bytes of a request of ``length`` tokens in a dense cache."""
    sizes = shape.num_layers, shape.num_kv_heads, shape.head_dim
    return dense_request_bytes(*sizes, dtype, length, DENSE_BLOCK).allocated


def _dense_size(model: nn.Module, length: int) -> dict:
    shape = ModelShape.in_context(model.config, length)
    return {"allocated": dense_bytes(shape, next(model.parameters()).dtype, length)}


def described(setting: Setting, resolved: ResolvedPolicy, dtype: torch.dtype) -> dict:
    """Return the fields of a record that describe a policy without its length."""
    roles = resolved.roles
    return {
        "budget": setting.budget,
        "whole": resolved.dense_length,
        "equal": setting.equal,
        "sinks": roles.sinks,
        "topk": roles.topk,
        "policy": resolved.spec.name,
        "protect": "all" if resolved.protect is True else int(resolved.protect),
        "window": roles.window,
        "allocated": resolved.request_bytes(setting.length, dtype, setting.prompt).allocated,
        "settings": resolved.settings,
    }


class _Observer(GateInputs):
    """Dense attention that records recall and output error of every setting and policy, layer by layer."""

    takes_sinks = True

    def __init__(self, pairs: list[tuple[Setting, ResolvedPolicy]], recall: bool, tick: Callable[[float], object]):
        super().__init__()
        self.pairs, self.recall, self.tick = pairs, recall, tick
        self.layers: list[list] = [[] for _ in pairs]

    def __call__(self, layer, q, k, v, scale, sink_logits=None):
        out, lse = dense_attention(q, k, v, scale, sink_logits)
        judge, signals = Judge(q, k, lse, scale), self.signals(layer, k, v)
        for layers, (setting, resolved) in zip(self.layers, self.pairs, strict=True):
            positions = setting.positions if self.recall else []
            # one judge for all policies, which share its results
            recall, error = resolved.on_dense(judge, layer, v, positions, signals, sink_logits)
            layers.append((recall, _output_error(error, out, resolved.roles.budget)))
            self.tick(1 / resolved.model.num_layers)
        return out

    def record(self, i: int) -> dict:
        """Return the recorded measures of pair i."""
        means, complete = {}, all(recall is not None for recall, _ in self.layers[i])
        for name in RECALL if complete else ():
            values = torch.stack([getattr(recall, name) for recall, _ in self.layers[i]])
            means |= {name: values.mean().item(), f"{name}_by_layer": values.tolist()}
        errors = torch.stack([error for _, error in self.layers[i]])
        return means | {"error": errors.mean().item(), "error_by_layer": errors.tolist()}


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
def _next_token(model, tokens, attend, dense: Predictions | None = None) -> tuple[dict[str, float], Predictions]:
    """Return the quality of next-token predictions, and the predictions.

    With predictions of the ``dense`` model, the quality includes the divergence from them.
    """
    hidden = decoder_of(model)(input_ids=tokens, attend=attend).last_hidden_state[0, :-1]
    head = model.get_output_embeddings()
    predictions = Predictions(hidden, lambda states: head(states).float())
    measures = token_measures(predictions, tokens[0], dense)
    means = {name: measures[name].mean().item() for name in ("nll", "accuracy", "kl") if name in measures}
    return {"tokens": len(hidden)} | means, predictions
