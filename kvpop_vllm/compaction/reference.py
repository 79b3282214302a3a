"""Reference tokens after a corpus, whose queries a compact cache is fitted to, and the fit layer by layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvpop_vllm.compaction.cache_attention import Recorder, attend
from kvpop_vllm.model_hook import hidden_states
from kvpop_vllm.rules.matching import Matching, match, padded


@dataclass(frozen=True)
class Reference:
    """Token sequences after a corpus of T tokens. Each begins at position T and sees the corpus and itself.

    Attributes:
        sequences: token ids of each.
        used: of each, the tokens from here on give queries. Earlier ones are an instruction.
        chunks: of each, the number of the chunk that it is about, or None if its queries are for all chunks.
    """

    sequences: list[list[int]]
    used: list[int]
    chunks: list[int | None]

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(map(len, self.sequences))


@torch.no_grad()
def read_corpus(model, tokens: list[int], first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return every layer's keys and values ``[H, T, D]`` of a text that begins at position ``first``."""
    recorder = Recorder()
    hidden_states(model, tokens, range(first, first + len(tokens)), recorder)
    return recorder.layers


class Fitting:
    """Attention of reference tokens that replaces each layer's cache by a compact one as it is reached.

    Args:
        caches: every layer's keys and values ``[H, T, D]`` of the corpus.
        reference: the reference tokens.
        budgets: ``[L, H]``, slots of each head.
        chunks: first token and the one after the last of each chunk.
        options: options of the fit.
        on_policy: True if upper layers see the compact caches of lower ones, False if they see the full caches.
        queries: most queries that a head is fitted to, drawn at random.
        seed: seed of the draw.
        slots: P, at least the largest budget, which it is by default.
        done: called after each layer.
    """

    def __init__(
        self,
        caches: list,
        reference: Reference,
        budgets: torch.Tensor,
        chunks: list[tuple[int, int]],
        options: Matching,
        *,
        on_policy: bool = True,
        queries: int = 4096,
        seed: int = 0,
        slots: int | None = None,
        done: Callable[[], object] = lambda: None,
    ):
        self.caches, self.budgets, self.chunks, self.options = caches, budgets, chunks, options
        self.slots = slots or int(budgets.max())
        self.on_policy, self.queries, self.seed, self.done = on_policy, queries, seed, done
        self.segments = torch.cat([torch.full((len(s),), i) for i, s in enumerate(reference.sequences)])
        used = [torch.arange(len(s)) >= a for s, a in zip(reference.sequences, reference.used, strict=True)]
        about = [
            torch.full((len(s),), -1 if c is None else c)
            for s, c in zip(reference.sequences, reference.chunks, strict=True)
        ]
        self.used, self.about = torch.cat(used), torch.cat(about)
        self.layers: list[tuple[torch.Tensor, ...]] = []

    @torch.no_grad()
    def __call__(self, layer, q, k, v, scale):
        """Fit one layer's cache and return its attention. See :class:`kvpop_vllm.model_hook.Attend`."""
        keys, values = self.caches[layer]
        by_head = q[0].unflatten(0, (keys.shape[0], -1))
        fitted = [self._fit(by_head, keys, values, layer, i, scale) for i in range(len(self.chunks))]
        compact = self._joined(fitted, values.dtype)
        self.layers.append(compact)
        # with on_policy later layers see the queries that the compact cache will get
        cache = compact if self.on_policy else (keys, values, None)
        out = attend(q, k, v, scale, *cache, self.segments.to(q.device))
        self.done()
        return out

    def _fit(self, by_head, keys, values, layer, number, scale) -> list[tuple[torch.Tensor, ...]]:
        """Return keys, values and biases of each head for one chunk."""
        a, b = self.chunks[number]
        # a draw for each layer and chunk, whatever the order in which they run
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + layer * 1009 + number)
        rows = torch.nonzero(self.used & ((self.about == number) | (self.about < 0))).squeeze(1)
        # a number stands for a token and a query head of the group
        pairs = torch.randperm(len(rows) * by_head.shape[1], generator=generator)[: self.queries]
        q = by_head[:, (pairs % by_head.shape[1]).to(keys.device), rows[pairs // by_head.shape[1]].to(keys.device)]
        # one product for all heads where their slots are equal in number
        counts = [self._share(int(count), number) for count in self.budgets[layer]]
        if len(set(counts)) == 1:
            return list(zip(*match(q, keys[:, a:b], values[:, a:b], counts[0], scale, self.options), strict=True))
        alone = [slice(h, h + 1) for h in range(len(counts))]
        fits = [
            match(q[h], keys[h, a:b], values[h, a:b], count, scale, self.options)
            for h, count in zip(alone, counts, strict=True)
        ]
        return [tuple(tensor[0] for tensor in fit) for fit in fits]

    def _share(self, count: int, number: int) -> int:
        """Return a chunk's part of a head's slots, in proportion to its tokens."""
        total = self.chunks[-1][1]
        a, b = self.chunks[number]
        # differences of rounded sums, so that chunks have all slots of the head together
        return count * b // total - count * a // total

    def _joined(self, fitted: list, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return k, v ``[H, P, D]`` and bias ``[H, P]`` of all chunks. Heads with fewer slots are padded."""
        heads = []
        for layer_parts in zip(*fitted, strict=True):
            k, v, bias = (torch.cat(tensors).unsqueeze(0) for tensors in zip(*layer_parts, strict=True))
            heads.append(padded(k, v, bias, self.slots))
        k, v, bias = (torch.cat(tensors) for tensors in zip(*heads, strict=True))
        return k.to(dtype), v.to(dtype), bias


def fit(model, fitting: Fitting, reference: Reference, tokens: int) -> list[tuple[torch.Tensor, ...]]:
    """Return every layer's compact keys, values and biases, in one pass over the reference tokens.

    Args:
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        fitting: fit of the layers.
        reference: the reference tokens.
        tokens: T, where each sequence of them begins.
    """
    positions = torch.cat([torch.arange(len(sequence)) for sequence in reference.sequences]) + tokens
    with torch.no_grad():
        hidden_states(model, [t for sequence in reference.sequences for t in sequence], positions, fitting)
    return fitting.layers
