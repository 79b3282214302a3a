"""Scores that are made anew in rounds, every m tokens, as VaSE and R-KV evict every m tokens (DESIGN "Rounds").

After token T with ``(T + 1) % m == 0`` each head ranks its long-range tokens: a token's score word is its rank less their number. A
token that leaves the window later scores 0, above all of them, so that until the next round those of lowest rank leave, one a step. They
are the tokens that the papers evict together.

Runs by torch's own operations, for one request after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpop_vllm.kernels.compress import held_queries, hold_queries
from kvpop_vllm.kernels.draws import draw, head_keys
from kvpop_vllm.kernels.ops import Redundancy, RetentionRule, SampledMass
from kvpop_vllm.kernels.pages import Pages
from kvpop_vllm.kernels.retained import slot_positions
from kvpop_vllm.roles import Retention


def interval(rounds: SampledMass | Redundancy, topk: int) -> int:
    """Return m of a head with so many long-range slots: at most half of them, so that half of what a round ranks outlives it."""
    return min(rounds.every, max(1, topk // 2))


BLOCK = 512
"""Keys whose cosines with all others are formed together."""


@dataclass(frozen=True)
class Rows:
    """Requests that have just advanced, a token each, or one request that has advanced by several.

    Attributes:
        pages: the layer's cache, written in place. table: ``[R, H, P]`` pages of the tails. ends: position behind the last token of each.
        budgets: B of each. windows: w of each. protected: p of each. seeds: of each, where the rule needs them.
    """

    pages: Pages
    table: torch.Tensor
    ends: list[int]
    budgets: list[int]
    windows: list[int]
    protected: list[int]
    seeds: torch.Tensor | None = None

    def retention(self, r: int, rule: RetentionRule) -> Retention:
        """Return the slots of request r's tail."""
        return Retention(self.budgets[r], rule.sinks, self.windows[r]).behind(self.protected[r])


def cuts(rule: RetentionRule, retention: Retention, start: int, end: int) -> list[int]:
    """Return where rounds cut the tokens ``[start, end)`` of a request, ascending, the end last; not where nothing that is ranked can leave
    before the next round. retention: of its tail."""
    if not retention.topk:
        return [end]
    every = interval(rule.rounds, retention.topk)
    first = max(start, retention.first + retention.budget - every)
    return [*range((first // every + 1) * every, end, every), end]


def advance(q: torch.Tensor, rows: Rows, rule: RetentionRule, scale: float) -> None:
    """Keep the queries that a round will want, and hold the rounds that are due.

    Args:
        q: ``[R, Hq, D]`` of the newest token of each request; or ``[L, Hq, D]`` of the L newest tokens of one, none but the last of which
            ends a round.
    """
    rounds, layout, count = rule.rounds, rows.pages.layout, len(q)
    first = _first_word(rule, layout.head_size)
    kept = [rows.retention(r, rule) for r in range(len(rows.ends))]
    every = [interval(rounds, retention.topk) for retention in kept]
    wanted, due = [], []
    for r, (end, retention, m) in enumerate(zip(rows.ends, kept, every, strict=True)):
        full = retention.first + retention.budget
        if not retention.topk:
            continue
        if end > max(retention.first, full - m - rounds.queries) and (-end) % m < rounds.queries:
            wanted.append(r)
        if end % m == 0 and end - 1 + m >= full and end > retention.first:
            due.append(r)
    states = rows.table[:, :, : layout.state_blocks]
    if wanted and len(rows.ends) == 1:
        newest = q[-rounds.queries :]
        places = torch.arange(rows.ends[0] - len(newest), rows.ends[0], device=q.device) % rounds.queries
        hold_queries(newest, rows.pages, states.expand(len(newest), -1, -1), places, first)
    elif wanted:
        at = slice(None) if len(wanted) == count else torch.tensor(wanted, device=q.device)
        places = torch.tensor([(rows.ends[r] - 1) % rounds.queries for r in wanted], device=q.device)
        hold_queries(q[at], rows.pages, states[at], places, first)
    for r in due:
        seed = None if rows.seeds is None else rows.seeds[r : r + 1]
        _hold_round(
            rows.pages, rows.table[r], rows.ends[r], kept[r], rule, scale, seed, q.shape[1] // layout.num_kv_heads
        )


def _hold_round(
    pages: Pages,
    row: torch.Tensor,
    seen: int,
    retention: Retention,
    rule: RetentionRule,
    scale: float,
    seed: torch.Tensor | None,
    group: int,
) -> None:
    """Write the scores of the long-range tokens of one request, ``row [H, P]``, that has seen so many."""
    layout, rounds = pages.layout, rule.rounds
    positions, order = slot_positions(pages, row, seen, retention).sort(1)  # [H, n]
    heads = torch.arange(len(order), device=order.device).unsqueeze(1)
    at = row[heads, layout.state_blocks + order // layout.block_slots].long(), heads, order % layout.block_slots
    tokens = Tokens(
        positions,
        pages.k[at].float(),
        pages.v[at].float(),
        held_queries(
            pages, row, _newest(rounds.queries, retention.window, seen), group, _first_word(rule, layout.head_size)
        ),
        retention.sinks,
        retention.window,
    )
    if isinstance(rounds, SampledMass):
        value = sampled_mass(tokens, rounds, scale, head_keys(seed, rounds.lanes)[0], seen - 1)
    else:
        value = without_redundancy(tokens, rounds, scale)
    chosen = tuple(x.expand_as(order)[:, retention.sinks : order.shape[1] - retention.window] for x in at)
    rank = value.argsort(dim=1, stable=True).argsort(dim=1)  # of equal ones the newer is higher
    pages.put(pages.score, chosen, (rank - rank.shape[1]).float())


def _first_word(rule: RetentionRule, head_size: int) -> int:
    """Return where in a head's state the queries begin: behind the moments, if it has any."""
    return rule.state_floats(head_size) - rule.rounds.state_floats(head_size)


def _newest(most: int, window: int, seen: int) -> torch.Tensor:
    """Return the places of the newest queries, oldest first: no more than the window has tokens, so that all come after all that is
    ranked."""
    return torch.arange(seen - min(most, window), seen) % most


@dataclass(frozen=True)
class Tokens:
    """What a request's heads hold of the tail, oldest first, and its newest queries.

    Attributes:
        positions: ``[H, n]``. keys, values: ``[H, n, D]`` float32. queries: ``[H, c, G, D]`` float32.
        sinks, window: how many of the oldest are sinks, and of the newest are the window.
    """

    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    sinks: int
    window: int

    @property
    def candidates(self) -> int:
        """Tokens before the window."""
        return self.positions.shape[1] - self.window

    def logits(self, scale: float) -> torch.Tensor:
        """Return the scaled logits ``[H, c, G, candidates]`` of the queries over the tokens before the window."""
        return torch.einsum("hcgd,hnd->hcgn", self.queries, self.keys[:, : self.candidates]) * scale


def sampled_mass(tokens: Tokens, rounds: SampledMass, scale: float, keys: torch.Tensor, q: int) -> torch.Tensor:
    """Return what ranks the long-range tokens under VaSE (arXiv:2606.03928), ``[H, n]`` int64: tokens whose values span the widest
    ranges are above all others and rank by these; of the others ``log w_t - log E_t``, E_t drawn from the exponential distribution. The
    best so many of these are a sample without replacement, weighted with w.

    w is the softmax over the tokens before the window, averaged over queries, over neighbours and over query heads.

    Args:
        keys: ``[H]`` int64, of draws. q: the newest token's position.
    """
    weights = tokens.logits(scale).softmax(-1).mean((1, 2))  # [H, candidates]
    weights = torch.nn.functional.avg_pool1d(
        weights.unsqueeze(1), rounds.neighbours, 1, rounds.neighbours // 2
    ).squeeze(1)
    values = tokens.values[:, : tokens.candidates]
    spread = (values.amax(-1) - values.amin(-1))[:, tokens.sinks :]
    by_spread = spread.argsort(dim=1, stable=True).argsort(dim=1)
    few = spread.shape[1] - max(0, tokens.candidates // rounds.large - tokens.sinks)
    positions = tokens.positions[:, tokens.sinks : tokens.candidates]
    uniform = (draw(keys.unsqueeze(1), q, positions) + 0.5) * 2.0**-53
    drawn = weights[:, tokens.sinks :].double().log() - (-uniform.log()).log()
    return torch.where(by_spread >= few, by_spread + drawn.shape[1], drawn.argsort(dim=1, stable=True).argsort(dim=1))


def without_redundancy(tokens: Tokens, rounds: Redundancy, scale: float) -> torch.Tensor:
    """Return what ranks the long-range tokens under R-KV (arXiv:2505.24133), ``[H, n]`` float32: ``weight I - (1 - weight) R`` (eq. 7).

    Importance I is the softmax over the tokens before the window of the largest logit of a KV head's query heads, averaged over
    queries, of which each token has the largest of its neighbourhood (eqs. 2 to 4). Redundancy R is the softmax of the mean cosine of a
    token's key with the others', the window's among them, where each of these leaves out the newest of those it resembles (eqs. 5, 6).
    """
    weights = tokens.logits(scale).amax(2).softmax(-1).mean(1)
    importance = torch.nn.functional.max_pool1d(
        weights.unsqueeze(1), rounds.neighbours, 1, rounds.neighbours // 2
    ).squeeze(1)
    unit = tokens.keys / (tokens.keys.norm(dim=-1, keepdim=True) + 1e-8)
    redundancy = torch.stack([_redundancy(head, rounds.similar) for head in unit])
    ranked = slice(tokens.sinks, tokens.candidates)
    return rounds.weight * importance[:, ranked] - (1 - rounds.weight) * redundancy[:, ranked]


def _redundancy(unit: torch.Tensor, similar: float) -> torch.Tensor:
    """Return R ``[n]`` of keys ``unit [n, D]`` of length 1, oldest first; cosines are formed in blocks of rows."""
    count = len(unit)
    total, numbers = torch.zeros(count, device=unit.device), torch.arange(count, device=unit.device)
    for rows in numbers.split(BLOCK):
        cosine = unit[rows] @ unit.T
        cosine[torch.arange(len(rows), device=unit.device), rows] = 0
        alike = cosine > similar
        newest = count - 1 - alike.flip(1).byte().argmax(1)
        spared = torch.where(alike.any(1), cosine.gather(1, newest.unsqueeze(1)).squeeze(1), 0.0)
        total += cosine.sum(0).index_add(0, newest, spared, alpha=-1)
    return (total / count).softmax(0)
