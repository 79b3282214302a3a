"""Rounds: recompute scores every m tokens, as VaSE, R-KV and TriAttention evict every m tokens (DESIGN "Rounds").

After token T with ``(T + 1) % m == 0`` each head ranks its long-range tokens. The score of a token is its
rank minus the number of ranked tokens, so all scores are negative. A token that leaves the window later
scores 0, which is above all of them. Until the next round the tokens of lowest rank are therefore evicted,
one per step. They are the tokens that the papers evict together.

The module uses torch operations and processes requests one by one. On a GPU the host waits for none of them.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvpop_vllm.cache.chunks import send
from kvpop_vllm.cache.pages import Pages, cdiv
from kvpop_vllm.kernels.draws import draw, head_keys
from kvpop_vllm.kernels.ops import ExpectedLogits, Redundancy, RetentionRule, SampledMass
from kvpop_vllm.roles import Retention
from kvpop_vllm.rope import band_norms
from kvpop_vllm.rules.compress import load_queries, pool, store_queries
from kvpop_vllm.rules.retained import slot_positions

BLOCK = 512
"""Number of keys whose cosines with all other keys are computed together."""
SMALLEST_SPREAD = 1e-6
"""Smallest standard deviation that values of TriAttention are divided by."""


def interval(every: int, topk: int) -> int:
    """Return m of equal heads with ``topk`` long-range slots each.

    It is at most half of them, so that half of the tokens that a round ranks are kept until the next round.

    Args:
        every: the method's m.
        topk: k.
    """
    return min(every, max(1, topk // 2))


def room_for_drafts(every: int, topk: int, equal: bool, position: int) -> int:
    """Return the number of drafts that may follow the token at ``position`` in its step.

    A round comes between two steps, so the token that ends one has a step of its own.

    Args:
        every: the method's m.
        topk: k of equal heads.
        equal: True if heads are equal, so that all have rounds after as many tokens.
        position: position of the token.
    """
    longest = interval(every, topk)
    before_round = (-(position + 1) % m for m in ((longest,) if equal else (longest, cdiv(longest, 2))))
    return max(0, min(before_round) - 1)


def intervals(every: int, budget: int, sinks: int, window: int) -> tuple[int, int]:
    """Return the intervals of the heads of a request: that of equal heads, and half of it.

    Arguments are as in :func:`layer_rounds`.
    """
    longest = interval(every, budget - sinks - window)
    return longest, cdiv(longest, 2)


class EqualRoles(NamedTuple):
    """Heads of one request and layer whose tails have the same slot roles, and the rounds that they have.

    Attributes:
        retention: slot roles of the tail.
        every: m, the number of tokens between rounds.
        heads: KV heads of the layer, None for all of them.
    """

    retention: Retention
    every: int
    heads: list[int] | None = None


@functools.lru_cache(maxsize=4096)
def layer_rounds(
    every: int, budget: int, budgets: tuple[int, ...], sinks: int, window: int, prefix: int
) -> list[EqualRoles]:
    """Return the heads of a layer whose tokens are ranked in rounds, grouped by their slot roles.

    A head's m is that of equal heads where its slots allow it, else half of that, so that rounds cut a prompt into few
    chunks, and ranks need not know each other's heads. A head that has no more long-range slots than half of m would
    lose every ranked token before the next round. It has no rounds, and its slots extend its window.

    Args:
        every: the method's m.
        budget: B of the request, the mean of all heads of the model.
        budgets: B of each head of the layer.
        sinks: s.
        window: w of the request.
        prefix: p, tokens of its protected prefix.
    """
    (longest, shortest), groups = intervals(every, budget, sinks, window), {}
    for head, size in enumerate(budgets):
        if size - sinks - window > shortest:
            groups.setdefault(size, []).append(head)
    return [
        EqualRoles(
            Retention(size, sinks, window).after_prefix(prefix),
            longest if interval(every, size - sinks - window) >= longest else shortest,
            heads if len(heads) < len(budgets) else None,
        )
        for size, heads in groups.items()
    ]


def cuts(groups: Sequence[EqualRoles], start: int, end: int) -> list[int]:
    """Return the positions at which rounds split the tokens ``[start, end)``, ascending, ``end`` last.

    Rounds after which no ranked token can be evicted before the next round are left out.

    Args:
        groups: heads of the request in the layer, and their rounds.
        start: position of the first token.
        end: position after the last token.
    """
    places = {end}
    for retention, every, _ in groups:
        first = max(start, retention.first + retention.budget - every)
        places.update(range((first // every + 1) * every, end, every))
    return sorted(places)


class Due(NamedTuple):
    """Work of rounds after a step.

    Attributes:
        ends: position after the last token of each request.
        stored: indices of the requests whose newest queries a later round needs.
        rounds: indices of the requests whose round is due, with the heads that it ranks.
    """

    ends: list[int]
    stored: list[int]
    rounds: list[tuple[int, EqualRoles]]


def due(queries: int, ends: list[int], rounds: Sequence[Sequence[EqualRoles]]) -> Due:
    """Return the work of rounds after a step.

    Args:
        queries: largest number of newest queries that a round needs.
        ends: position after the last token of each request.
        rounds: heads of each request in the layer, and their rounds.
    """
    stored, ranked = {}, []
    for r, (end, groups) in enumerate(zip(ends, rounds, strict=True)):
        for group in groups:
            retention, m, _ = group
            full = retention.first + retention.budget
            # the next round reads this query if fewer tokens are left until then than it reads queries
            if end > max(retention.first, full - m - queries) and (-end) % m < queries:
                stored[r] = True
            if end % m == 0 and end - 1 + m >= full and end > retention.first:
                ranked.append((r, group))
    return Due(ends, list(stored), ranked)


def run_due_rounds(
    q: torch.Tensor,
    pages: Pages,
    table: torch.Tensor,
    step: Due,
    seeds: torch.Tensor | None,
    rule: RetentionRule,
    scale: float,
    sink_logits: torch.Tensor | None,
) -> None:
    """Store the queries that a later round needs, and run the rounds that are due, see :func:`run_rounds`.

    Args:
        q: ``[R, Hq, D]``, the newest token of each request; or ``[L, Hq, D]``, the L newest tokens of one
            request, of which only the last may end a round.
        pages: the layer's cache, written in place.
        table, step, seeds, rule, scale, sink_logits: as in :func:`run_rounds`.
    """
    rounds, layout, ends, stored = rule.rounds, pages.layout, step.ends, step.stored
    first, states = rule.first_query(layout.head_size), table[:, :, : layout.state_blocks]
    # with one request the tokens may be a chunk, of which the next round reads the last ones only
    if stored and len(ends) == 1:
        newest = q[-rounds.queries :]
        places = torch.arange(ends[0] - len(newest), ends[0], device=q.device) % rounds.queries
        store_queries(newest, pages, states.expand(len(newest), -1, -1), places, first)
    elif stored:
        requests = slice(None) if len(stored) == len(q) else torch.tensor(stored, device=q.device)
        places = torch.tensor([(ends[r] - 1) % rounds.queries for r in stored], device=q.device)
        store_queries(q[requests], pages, states[requests], places, first)
    run_rounds(pages, table, step, seeds, rule, scale, q.shape[1] // layout.num_kv_heads, sink_logits)


def run_rounds(
    pages: Pages,
    table: torch.Tensor,
    step: Due,
    seeds: torch.Tensor | None,
    rule: RetentionRule,
    scale: float,
    group: int,
    sink_logits: torch.Tensor | None,
) -> None:
    """Run the rounds that are due. A round reads no scores, so that it may be run again.

    Args:
        pages: the layer's cache, written in place.
        table: ``[R, H, P]`` pages of the tails.
        step: work of the rounds.
        seeds: ``[R]`` int64 seeds of the requests, or None if the rule does not need them.
        rule: rule with rounds.
        scale: factor on q . k.
        group: G.
        sink_logits: ``[Hq]`` logits of attention sinks, or None.
    """
    for r, roles in step.rounds:
        seed = None if seeds is None else seeds[r : r + 1]
        _run_round(pages, table[r], step.ends[r], roles, rule, scale, seed, group, sink_logits)


def _run_round(
    pages: Pages,
    row: torch.Tensor,
    tokens_seen: int,
    ranked: EqualRoles,
    rule: RetentionRule,
    scale: float,
    seed: torch.Tensor | None,
    group: int,
    sink_logits: torch.Tensor | None,
) -> None:
    """Write new scores of the long-range tokens of heads of one request with pages ``row [H, P]``.

    Args:
        tokens_seen: number of tokens that the request has processed.
        ranked: the heads, and the slot roles of their tails.
        seed: ``[1]`` seed of the request, or None if the rule does not need it.
        group: G.
        sink_logits: ``[Hq]`` logits of attention sinks, or None.
    """
    layout, rounds, retention, device = pages.layout, rule.rounds, ranked.retention, row.device
    heads = range(layout.num_kv_heads) if ranked.heads is None else ranked.heads
    chosen_heads = send(list(heads), device)
    # oldest first, because neighbours are those of the text
    positions, order = slot_positions(pages, row, tokens_seen, retention, heads=chosen_heads).sort(1)  # [heads, n]
    heads = chosen_heads.unsqueeze(1)
    index = row[heads, layout.state_blocks + order // layout.block_slots].long(), heads, order % layout.block_slots
    chosen = tuple(x.expand_as(order)[:, retention.sinks : order.shape[1] - retention.window] for x in index)
    if isinstance(rounds, ExpectedLogits):
        of_heads = replace(rounds, mean=rounds.mean[chosen_heads], excess=rounds.excess[chosen_heads])
        value = expected_logits(pages.k[chosen].float(), of_heads, tokens_seen)
    else:
        newest = _newest(rounds.queries, retention.window, tokens_seen)
        queries = load_queries(pages, row, send(newest, device), group, rule.first_query(layout.head_size))
        queries = queries[chosen_heads]
        sink_logits = None if sink_logits is None else sink_logits.view(-1, group)[chosen_heads]
        keys, values = pages.k[index].float(), pages.v[index].float()
        tokens = Tokens(positions, keys, values, queries, retention.sinks, retention.window, sink_logits)
        if isinstance(rounds, SampledMass):
            value = sampled_mass(tokens, rounds, scale, head_keys(seed, rounds.lanes)[0, chosen_heads], tokens_seen - 1)
        else:
            value = without_redundancy(tokens, rounds, scale)
    rank = value.argsort(dim=1, stable=True).argsort(dim=1)  # of equal values the newer ranks higher
    pages.put(pages.score, chosen, (rank - rank.shape[1]).float())


def _newest(stored: int, window: int, tokens_seen: int) -> list[int]:
    """Return the indices of the newest stored queries, oldest first.

    At most ``window`` queries are used, so that all of them come after every ranked token.
    """
    return [q % stored for q in range(tokens_seen - min(stored, window), tokens_seen)]


@dataclass(frozen=True)
class Tokens:
    """Retained tokens of the tail of one request, oldest first, and its newest queries.

    Attributes:
        positions: ``[H, n]``.
        keys, values: ``[H, n, D]`` float32.
        queries: ``[H, c, G, D]`` float32.
        sinks: number of sinks, the oldest of the n tokens.
        window: number of window tokens, the newest of the n tokens.
        sink_logits: ``[H, G]`` logits of attention sinks, or None.
    """

    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    sinks: int
    window: int
    sink_logits: torch.Tensor | None = None

    @property
    def candidates(self) -> int:
        """Number of tokens before the window."""
        return self.positions.shape[1] - self.window

    def logits(self, scale: float) -> torch.Tensor:
        """Return the scaled logits ``[H, c, G, candidates]`` over the tokens before the window, then those of the sinks.

        Without attention sinks the last axis has no more elements.
        """
        logits = torch.einsum("hcgd,hnd->hcgn", self.queries, self.keys[:, : self.candidates]) * scale
        if self.sink_logits is None:
            return logits
        return torch.cat([logits, self.sink_logits[:, None, :, None].expand(-1, logits.shape[1], -1, -1)], -1)


def sampled_mass(tokens: Tokens, rounds: SampledMass, scale: float, keys: torch.Tensor, q: int) -> torch.Tensor:
    """Return the values ``[H, n]`` int64 by which VaSE ranks the long-range tokens (arXiv:2606.03928).

    Tokens whose values span the widest ranges rank above all others, by these ranges. The other tokens have
    ``log w_t - log E_t``, with E_t drawn from the exponential distribution. The best of them are a sample
    without replacement, weighted with w. The weight w is the softmax over the tokens before the window and the
    attention sink, averaged over queries, query heads and neighbours.

    Args:
        tokens: retained tokens of the request.
        rounds: parameters of the method.
        scale: factor on q . k.
        keys: ``[H]`` int64, keys of the draws.
        q: position of the newest token.
    """
    weights = tokens.logits(scale).softmax(-1)[..., : tokens.candidates].mean((1, 2))  # [H, candidates]
    weights = pool(F.avg_pool1d, weights, rounds.neighbours)
    values = tokens.values[:, : tokens.candidates]
    spread = (values.amax(-1) - values.amin(-1))[:, tokens.sinks :]
    by_spread = spread.argsort(dim=1, stable=True).argsort(dim=1)
    few = spread.shape[1] - max(0, tokens.candidates // rounds.large - tokens.sinks)
    positions = tokens.positions[:, tokens.sinks : tokens.candidates]
    # 0.5 more, since a draw of 0 has no finite logarithm
    uniform = (draw(keys.unsqueeze(1), q, positions) + 0.5) * 2.0**-53
    drawn = weights[:, tokens.sinks :].double().log() - (-uniform.log()).log()
    return torch.where(by_spread >= few, by_spread + drawn.shape[1], drawn.argsort(dim=1, stable=True).argsort(dim=1))


def without_redundancy(tokens: Tokens, rounds: Redundancy, scale: float) -> torch.Tensor:
    """Return the values ``[H, n]`` float32 by which R-KV ranks the long-range tokens (arXiv:2505.24133).

    The value is ``weight I - (1 - weight) R`` (eq. 7). Importance I (eqs. 2 to 4) is formed in this order:
    the largest logit of a KV head's query heads, the softmax over the tokens before the window and the attention
    sink, the mean over queries, and the maximum over each token's neighbourhood. Redundancy R (eqs. 5, 6) is the
    softmax of a token's mean cosine with the keys of the other tokens, including the window. Each other token leaves
    out the newest token that it is similar to.

    Args:
        tokens: retained tokens of the request.
        rounds: parameters of the method.
        scale: factor on q . k.
    """
    weights = tokens.logits(scale).amax(2).softmax(-1)[..., : tokens.candidates].mean(1)
    importance = pool(F.max_pool1d, weights, rounds.neighbours)
    unit = tokens.keys / (tokens.keys.norm(dim=-1, keepdim=True) + 1e-8)
    redundancy = _redundancy(unit, rounds.similar)
    ranked = slice(tokens.sinks, tokens.candidates)
    return rounds.weight * importance[:, ranked] - (1 - rounds.weight) * redundancy[:, ranked]


def expected_logits(keys: torch.Tensor, rounds: ExpectedLogits, length: int) -> torch.Tensor:
    """Return the values ``[H, n]`` float32 by which TriAttention ranks keys (arXiv:2604.04921).

    A key has been rotated to its position. Its logit with a query that rotates to position ``length + d`` is their
    inner product, so the mean over distances d is that with the mean query, which is turned by ``length``.

    Args:
        keys: ``[H, n, D]`` float32, the ranked keys.
        rounds: parameters of the method.
        length: number of tokens that the request has processed.
    """
    pairs = len(rounds.frequencies)
    # float64, because angles grow with the position: float32 would round one at 100,000 by 0.004 radians
    angles = length * rounds.frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b, unrotated = rounds.mean.double().split([pairs, pairs, keys.shape[-1] - 2 * pairs], -1)
    query = torch.cat([a * cos - b * sin, b * cos + a * sin, unrotated], -1).float()
    value = torch.einsum("hgd,hnd->hgn", query, keys)
    value += torch.einsum("hgf,hnf->hgn", rounds.excess, band_norms(keys, pairs))
    spread, mean = torch.std_mean(value, -1, correction=0, keepdim=True)
    return ((value - mean) / spread.clamp_min(SMALLEST_SPREAD)).amax(1)


def _redundancy(unit: torch.Tensor, similar: float) -> torch.Tensor:
    """Return R ``[H, n]`` of keys ``unit [H, n, D]`` of length 1, oldest first; on a CPU head by head."""
    heads, count, _ = unit.shape
    if unit.device.type == "cpu" and heads > 1:
        return torch.cat([_redundancy(head, similar) for head in unit.split(1)])
    total = torch.zeros(heads, count, device=unit.device)
    for begin in range(0, count, BLOCK):
        cosine = unit[:, begin : begin + BLOCK] @ unit.mT  # [H, block, n]
        cosine.diagonal(begin, 1, 2).zero_()
        alike = cosine > similar
        # argmax takes no booleans, and of equal values it returns the first
        newest = count - 1 - alike.flip(2).byte().argmax(2)
        spared = torch.where(alike.any(2), cosine.gather(2, newest.unsqueeze(2)).squeeze(2), 0.0)
        total += cosine.sum(1).scatter_add_(1, newest, -spared)
    return (total / count).softmax(1)
