"""Losses of one layer, or of one head, when its slots shrink: the divergence of the model's output.

Layers are those with full attention. A row is read once with dense attention. The input of a layer is then known, and
the model's layers from there on run again for the last queries of the row, with dense keys and values of everything
before. Several variants run as one batch. The layer itself sees the first tokens and a window, or what a policy keeps
by the kernels of serving. A recurrent layer begins a row without a state, so that with such layers all queries of a row
run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache

import torch
import torch.nn.functional as F

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.policies import ResolvedPolicy
from kvpop_vllm.evaluation.serving_kernels import attend_and_keep
from kvpop_vllm.local_attention import grouped_attention, local_attention
from kvpop_vllm.model_hook import Dense, decoder_of

BATCH = 16
"""Most variants that run at once; their queries are at most as many as a row's, unless one variant has more."""
POSITIONS = 256
"""Predictions whose logits over the whole vocabulary are in memory at once."""
NORMS = "norm", "norm_f", "final_layernorm"
"""Names of a decoder's final norm."""


class RowReplay:
    """A row of tokens that was read with dense attention, and whose layers can run again.

    Args:
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        tokens: ``[S]``.
        queries: number of last queries that run again.

    Attributes:
        attended: queries, keys and values of each layer with full attention.
        outputs: attention of each of these layers for the last queries, ``[1, Hq, Q, D]``.
        scales: factor on q . k of each of these layers.
        numbers: indices in the model of these layers.
        local_keys: keys and values of each other layer that attends, by its index in the model.
        inputs: input of each layer with full attention for the last queries, ``[1, Q, E]``.
        arguments: further arguments of each layer of the model, for the last queries.
        exact: ``[Q, V]``, log-probabilities of the last queries.
    """

    def __init__(self, model: torch.nn.Module, tokens: torch.Tensor, queries: int):
        self.model, self.queries, self.length = model, queries, len(tokens)
        decoder = decoder_of(model)
        norm = next((getattr(decoder, name) for name in NORMS if hasattr(decoder, name)), None)
        if norm is None:
            raise ConfigError("the model's decoder has no final norm of the usual name: choose another model")
        self.layers, self.norm = decoder.layers, norm
        self.attended: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.outputs: list[torch.Tensor] = []
        self.scales: list[float] = []
        self.numbers: list[int] = []
        self.local_keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.inputs: list[torch.Tensor] = []
        self.arguments: list[dict] = []
        self._input: torch.Tensor | None = None
        # layers run again one by one later, with what the decoder has handed each of them
        hooks = [layer.register_forward_pre_hook(self._note, with_kwargs=True) for layer in self.layers]
        try:
            hidden = decoder(input_ids=tokens[None], attend=_Reading(self)).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        self._input = None
        self.exact = self._log_probabilities(hidden[0, -queries:])

    def _note(self, layer, positional, named):
        self._input = positional[0] if positional else named["hidden_states"]
        options = {name: self._last(value) for name, value in named.items() if name not in ("hidden_states", "attend")}
        self.arguments.append(options)

    def note_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float
    ) -> None:
        """Note what the running layer, one with full attention, attends to, and its input and output for the last queries."""
        self.attended.append((q, k, v))
        self.scales.append(scale)
        self.outputs.append(out[:, :, -self.queries :].clone())
        # _note() has counted the running layer
        self.numbers.append(len(self.arguments) - 1)
        self.inputs.append(self._last(self._input).clone())

    def _last(self, value):
        """Return an argument of a layer for the last queries alone."""
        if isinstance(value, tuple | list):
            return type(value)(map(self._last, value))
        if not isinstance(value, torch.Tensor):
            return value
        # rows or tokens come first, whatever the argument: masks, positions, rotary tables
        axis = next((i for i, size in enumerate(value.shape[:2]) if size == self.length), None)
        return value if axis is None else value.narrow(axis, self.length - self.queries, self.queries)

    def _log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        head, blocks = self.model.get_output_embeddings(), hidden.split(POSITIONS)
        return torch.cat([head(part).float().log_softmax(-1) for part in blocks])

    def run_from(self, layer: int, attend: Again) -> torch.Tensor:
        """Return the last hidden states of the last queries, ``[V, Q, E]``.

        Args:
            layer: the first layer with full attention that runs again.
            attend: its attention.
        """
        # layers before it are as in the dense pass, and so are the keys of earlier tokens in all layers
        first, dense = self.numbers[layer], Again(self)
        hidden = self.inputs[layer].expand(attend.variants, -1, -1)
        for number in range(first, len(self.layers)):
            function = attend if number == first or attend.everywhere else dense
            out = self.layers[number](hidden, **self.arguments[number], attend=function)
            # layers of some models return more than hidden states
            hidden = out[0] if isinstance(out, tuple) else out
        return self.norm(hidden)

    def joined(self, k: torch.Tensor, v: torch.Tensor, past: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values ``[V, H, S, D]``: those before the last queries, ``past``, and those of the last queries."""
        before = self.length - self.queries
        pairs = zip(past, (k, v), strict=True)
        # keys before the last queries are one set for all variants
        k, v = (torch.cat([old[:, :, :before].expand(len(new), -1, -1, -1), new], 2) for old, new in pairs)
        return k, v

    def visible(self, first: int, windows: torch.Tensor) -> torch.Tensor:
        """Return which tokens the last queries see, ``[..., Q, S]`` booleans: the first ones and a window.

        Args:
            first: number of first tokens.
            windows: ``[...]`` tokens of a window.
        """
        tokens = torch.arange(self.length, device=self.exact.device)
        queries = tokens[-self.queries :, None]
        recent = tokens > queries - windows.to(tokens.device)[..., None, None]
        return (tokens <= queries) & (recent | (tokens < first))

    def divergence(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return KL(dense || variant) of hidden states ``[V, Q, E]``, mean over predictions, ``[V]`` float64."""
        losses = []
        # variant by variant, since log-probabilities of all would take V times the memory
        for variant in hidden:
            blocks = zip(variant.split(POSITIONS), self.exact.split(POSITIONS), strict=True)
            of_parts = [_divergences(self._log_probabilities(part), exact) for part, exact in blocks]
            losses.append(torch.cat(of_parts).double().mean().cpu())
        # rounding may make a divergence negative
        return torch.stack(losses).clamp_min(0)


def _divergences(variant: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return KL(exact || variant) of log-probabilities ``[T, V]``, ``[T]``."""
    return F.kl_div(variant, exact, reduction="none", log_target=True).sum(-1)


class _Reading:
    """Dense attention that notes what a row's layers attend to."""

    def __init__(self, row: RowReplay):
        self.row = row

    def __call__(self, layer, q, k, v, scale):
        """Return the attention of a layer. See :class:`kvpop_vllm.model_hook.Attend`."""
        out = Dense()(layer, q, k, v, scale)
        self.row.note_attention(q, k, v, out, scale)
        return out

    def local(self, layer, q, k, v, scale, kind, size):
        """Return the attention of a layer with windows or chunks. See :class:`kvpop_vllm.model_hook.Attend`."""
        self.row.local_keys[layer] = k, v
        return local_attention(q, k, v, scale, kind, size)


class Again:
    """Attention of the last queries to all tokens, those before them with the dense keys and values of a row.

    Attributes:
        variants: V, variants that run at once.
        everywhere: True if it is the attention of all later layers with full attention too.
    """

    variants, everywhere = 1, False

    def __init__(self, row: RowReplay):
        self.row = row

    def __call__(self, layer, q, k, v, scale):
        """Return the attention ``[V, Hq, Q, D]`` of all variants."""
        return Dense()(layer, q, *self.row.joined(k, v, self.row.attended[layer][1:]), scale)

    def local(self, layer, q, k, v, scale, kind, size):
        """Return the attention of a layer with windows or chunks. See :class:`kvpop_vllm.model_hook.Attend`."""
        return local_attention(q, *self.row.joined(k, v, self.row.local_keys[layer]), scale, kind, size)


class Windowed:
    """Attention of the last queries of a layer that sees the first tokens and a window. See :data:`Kept`.

    Args:
        first: number of first tokens that are seen.
    """

    def __init__(self, first: int):
        self.first = first

    def __call__(self, row: RowReplay, layer: int, size: int, scale: float) -> torch.Tensor:
        """Return the attention with a window of ``size`` tokens."""
        q, k, v = row.attended[layer]
        mask = row.visible(self.first, torch.tensor(size))
        return grouped_attention(q[:, :, -row.queries :], k, v, scale, attn_mask=mask)


class Evicting:
    """Attention of the last queries of a layer under a policy. See :data:`Kept`.

    Args:
        policy: the policy; its sinks and window belong to every size.
    """

    def __init__(self, policy: ResolvedPolicy):
        self.policy = policy

    def __call__(self, row: RowReplay, layer: int, size: int, scale: float) -> torch.Tensor:
        """Return the attention with ``size`` long-range slots of each head."""
        q, k, v = row.attended[layer]
        budgets = torch.full((k.shape[1],), self.policy.roles.first_long + size, dtype=torch.int32)
        out, _ = attend_and_keep(self.policy, layer, q, k, v, scale, [], budgets=budgets)
        return out[:, :, -row.queries :]


Kept = Callable[[RowReplay, int, int, float], torch.Tensor]
"""Function ``(row, layer, size, scale) -> [1, Hq, Q, D]``: the attention of a layer's last queries with a number of slots."""


class Shrunk(Again):
    """Attention of the last queries of one layer, in which some heads have fewer slots.

    Args:
        row: the row.
        attention: attention with a number of slots.
        variants: KV heads that shrink and the slots that they have, for each variant; no head stands for all.
    """

    def __init__(self, row: RowReplay, attention: Kept, variants: list[tuple[int | None, int]]):
        super().__init__(row)
        self.attention, self.chosen, self.variants = attention, variants, len(variants)

    def __call__(self, layer, q, k, v, scale):
        """Return the attention ``[V, Hq, Q, D]`` of all variants."""
        group, outs = q.shape[1] // k.shape[1], []
        # once for each size, whatever heads have it
        sizes = dict.fromkeys(size for _, size in self.chosen)
        by_size = {size: self.attention(self.row, layer, size, scale) for size in sizes}
        for head, size in self.chosen:
            out = by_size[size]
            if head is not None:
                heads = slice(head * group, (head + 1) * group)
                # heads that do not shrink see the whole row
                out = self.row.outputs[layer].clone()
                out[:, heads] = by_size[size][:, heads]
            outs.append(out)
        return torch.cat(outs)


class Shared(Again):
    """Attention of the last queries in which every head of every layer sees the first tokens and a window.

    Args:
        row: the row.
        first: number of first tokens that are seen.
        windows: ``[V, layers, H]``, tokens of each head's window.
    """

    everywhere = True

    def __init__(self, row: RowReplay, first: int, windows: torch.Tensor):
        super().__init__(row)
        self.first, self.windows, self.variants = first, windows, len(windows)

    def __call__(self, layer, q, k, v, scale):
        """Return the attention ``[V, Hq, Q, D]`` of all variants."""
        group = q.shape[1] // k.shape[1]
        mask = self.row.visible(self.first, self.windows[:, layer].repeat_interleave(group, 1))
        k, v = self.row.joined(k, v, self.row.attended[layer][1:])
        return grouped_attention(q, k, v, scale, attn_mask=mask)


@torch.inference_mode()
def shared_losses(row: RowReplay, first: int, windows: torch.Tensor) -> list[float]:
    """Return the KL with each table of windows ``[V, layers, H]``, in nats per token."""
    groups = (Shared(row, first, part) for part in windows.split(variants_at_once(row.queries, row.length)))
    return [loss for part in groups for loss in row.divergence(row.run_from(0, part)).tolist()]


@torch.inference_mode()
def attention_errors(row: RowReplay, layer: int, attention: Kept, sizes: list[int]) -> list[list[float]]:
    """Return the squared error of each KV head's attention with each number of slots, over the squared size of the layer's."""
    exact, heads, errors = row.outputs[layer].double(), row.attended[layer][1].shape[1], []
    squared_size = exact.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    for size in sizes:
        difference = attention(row, layer, size, row.scales[layer]).double() - exact
        errors.append(difference.square().unflatten(1, (heads, -1)).sum((0, 2, 3, 4)) / squared_size)
    return torch.stack(errors, 1).tolist()


@torch.inference_mode()
def layer_losses(row: RowReplay, layer: int, attention: Kept, sizes: list[int]) -> list[float]:
    """Return the KL with each number of slots of all heads of a layer, in nats per token."""
    return _losses(row, layer, attention, [(None, size) for size in sizes])


def layer_measures(row: RowReplay, layer: int, attention: Kept, sizes: list[int]) -> list[list[float]]:
    """Return :func:`layer_losses`, then :func:`attention_errors` of each head. The attention of a size is taken once."""
    attention = cache(attention)
    return [layer_losses(row, layer, attention, sizes), *attention_errors(row, layer, attention, sizes)]


@torch.inference_mode()
def head_losses(row: RowReplay, layer: int, attention: Kept, sizes: list[int]) -> list[list[float]]:
    """Return the KL with each number of slots of each KV head of a layer alone, in nats per token."""
    heads = row.attended[layer][1].shape[1]
    losses = iter(_losses(row, layer, attention, [(head, size) for size in sizes for head in range(heads)]))
    by_size = [[next(losses) for _ in range(heads)] for _ in sizes]
    return [list(of_head) for of_head in zip(*by_size, strict=True)]


def _losses(row: RowReplay, layer: int, attention: Kept, variants: list) -> list[float]:
    # variants of one size follow each other, and may not all run at once
    attention = lru_cache(maxsize=1)(attention)
    return [
        loss
        for part in _parts(variants, variants_at_once(row.queries, row.length))
        for loss in row.divergence(row.run_from(layer, Shrunk(row, attention, part))).tolist()
    ]


def variants_at_once(queries: int, length: int) -> int:
    """Return the number of variants that run at once.

    Args:
        queries: number of last queries of a row that run again.
        length: tokens of the row.
    """
    return min(BATCH, max(1, length // queries))


def _parts(variants: list, count: int) -> Iterator[list]:
    return (variants[i : i + count] for i in range(0, len(variants), count))
