"""Compression of a prompt at its end.

The last queries of the prompt vote for the tokens to retain (SnapKV, arXiv:2404.14469), or slots are fitted to them
(attention matching, arXiv:2602.16284). Compression runs once per request and layer, with torch operations on any
device. On a GPU the host waits for none of them but those of a fit.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvpop_vllm.cache.chunks import send
from kvpop_vllm.cache.divided_heads import load_page_table, store_budgets
from kvpop_vllm.cache.pages import Pages, Prefix
from kvpop_vllm.kernels.ops import PromptVotes, RetentionRule
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.rules.matching import Matching, fit

LEAST_VOTE = torch.finfo(torch.float32).tiny
"""Smallest vote; replaces 0, whose logarithm is not finite."""


def store_queries(q: torch.Tensor, pages: Pages, states: torch.Tensor, places: torch.Tensor, first: int = 0) -> None:
    """Write queries to the states of their requests.

    Args:
        q: ``[L, Hq, D]``.
        pages: pages of the tails; states are written in place.
        states: ``[L, H, S]`` state blocks of each query's request.
        places: ``[L]`` int64, index of each query among the queries of the state.
        first: offset of the queries in the state, in float32 values.
    """
    words = q.reshape(len(q), pages.layout.num_kv_heads, -1).float()  # [L, H, G * D]
    pages.put(pages.state, _words(pages, states, places, words.shape[-1], first), words)


def load_queries(pages: Pages, row: torch.Tensor, places: torch.Tensor, group: int, first: int = 0) -> torch.Tensor:
    """Return the stored queries ``[H, c, G, D]`` at indices ``places [c]`` of one request.

    Args:
        pages: pages of the tail.
        row: ``[H, P]`` pages of the request, state blocks first.
        places: ``[c]`` indices among the queries of the state.
        group: G.
        first: offset of the queries in the state, in float32 values.
    """
    states = row[:, : pages.layout.state_blocks].expand(len(places), -1, -1)
    words = pages.state[_words(pages, states, places.to(row.device), group * pages.layout.head_size, first)]
    return words.transpose(0, 1).unflatten(-1, (group, -1))


def compress(
    pages: Pages,
    row: torch.Tensor,
    prefix: Prefix,
    budgets: torch.Tensor,
    after: RequestSlots,
    made_row: torch.Tensor,
    *,
    group: int,
    rule: RetentionRule,
    scale: float,
    sink_logits: torch.Tensor | None,
) -> None:
    """Replace the prompt in the prefix by what its rule retains or makes of it.

    Args:
        pages: the tail's cache, written in place.
        row: ``[H, P]`` int32 pages of the tail, state blocks first; the state holds the queries. If heads
            divide their slots, the regions of the tail's blocks as for equal heads.
        prefix: prefix of this request (R = 1), with all p tokens written and its ``tokens`` on the CPU.
        budgets: ``[H]`` int32, slots of each head's tail after the prompt's end.
        after: what the request is after the prompt's end.
        made_row: ``[F]`` int32, blocks of the slots that are made of the prompt.
        group: query heads per KV head of this layer.
        rule: rule that compresses prompts.
        scale: factor on q . k.
        sink_logits: ``[Hq]`` logits of attention sinks, or None.
    """
    p, compression = int(prefix.tokens[0]), rule.compression
    # queries inside the window alone see every token that they vote on
    count = min(compression.queries, after.window, p - after.shift - after.made_slots)
    # the state is a ring of the newest queries, so that an index is a position modulo its size
    queries = load_queries(pages, row, torch.arange(p - count, p, device=row.device) % compression.queries, group)
    sinks = None if sink_logits is None else sink_logits.view(-1, group)
    if compression.makes_slots:
        make_slots(pages, row, prefix, after, made_row, queries, scale, sinks)
    else:
        retain_by_votes(pages, row, prefix, budgets, after.window, queries, rule, scale, sinks)


def retain_by_votes(
    pages: Pages,
    row: torch.Tensor,
    prefix: Prefix,
    budgets: torch.Tensor,
    window: int,
    voters: torch.Tensor,
    rule: RetentionRule,
    scale: float,
    sink_logits: torch.Tensor | None,
) -> None:
    """Fill a tail with the retained tokens of the prompt in the prefix.

    Afterwards the tail is that of an unprotected request that has seen p tokens. The attention of the last
    queries to the tokens before them is averaged over queries, query heads and
    neighbours. Retained are the sinks, the last w tokens, and the ``B - s - w`` tokens with the most votes;
    ties keep the newer token. A token's score is the logarithm of its votes. It is below 0,
    the score of every token that leaves the window later. If heads divide their slots, they do so first.

    Args:
        pages, row, prefix, budgets, rule, scale: as in :func:`compress`.
        window: w.
        voters: ``[H, c, G, D]``, the last queries.
        sink_logits: ``[H, G]`` logits of attention sinks, or None.
    """
    layout, p = pages.layout, int(prefix.tokens[0])
    keys, values = prefix.gather(0, 0, p)
    votes = prompt_votes(voters, keys, scale, rule.compression, sink_logits)
    sinks, first, device = rule.sinks, rule.sinks + window, keys.device
    oldest = max(sinks, p - window)
    candidates = votes[:, sinks:oldest]
    if rule.compression.adaptive_head_budgets:
        budget = int(budgets[0])  # until here all heads have the mean budget
        budgets, largest = divide(candidates, budget, first, rule.compression.safe), layout.num_kv_heads * budget
        store_budgets(pages, row, budgets, rule.compression)
        _, (row,) = load_page_table(pages, row.unsqueeze(0), rule.compression, layout.blocks(largest, largest))
    else:
        budgets, largest = send(budgets, device), int(budgets.max())
    near = torch.cat([torch.arange(n, m, device=device) for n, m in ((0, min(sinks, p)), (oldest, max(oldest, p)))])
    # stable sort, newest first: of equal votes the newer token is retained
    order = candidates.flip(1).argsort(dim=1, descending=True, stable=True)[:, : largest - first]
    fits = torch.arange(order.shape[1], device=device) < budgets.unsqueeze(1) - first
    chosen = torch.where(fits, candidates.shape[1] - 1 - order, p).sort(dim=1).values + sinks  # oldest first
    tokens = torch.cat([near.expand(len(votes), -1), chosen], 1)
    # the slots that decoding would have given these tokens (Retention.ring_slot)
    slots = torch.where(near < sinks, near, sinks + (near - sinks) % window)
    slots = torch.cat([slots, first + torch.arange(order.shape[1], device=device)]).expand_as(tokens)
    # a head with fewer slots than another one writes its last token several times
    index = torch.arange(tokens.shape[1], device=device).minimum(len(near) + fits.sum(1, keepdim=True) - 1)
    tokens, slots = tokens.gather(1, index), slots.gather(1, index)
    score = votes.gather(1, tokens).clamp_min(LEAST_VOTE).log().masked_fill(index < len(near), 0.0)
    heads, row = torch.arange(len(votes), device=device).unsqueeze(1).expand_as(tokens), row.long()
    slots_at = row.gather(1, layout.state_blocks + slots // layout.block_slots), heads, slots % layout.block_slots
    rows = tokens.unsqueeze(-1).expand(-1, -1, keys.shape[-1])
    pages.put(pages.k, slots_at, keys.gather(1, rows))
    pages.put(pages.v, slots_at, values.gather(1, rows))
    pages.put(pages.score, slots_at, score)
    pages.put(pages.position, slots_at, tokens.int())
    _set_seen(pages, row, p)


def make_slots(
    pages: Pages,
    row: torch.Tensor,
    prefix: Prefix,
    after: RequestSlots,
    made_row: torch.Tensor,
    queries: torch.Tensor,
    scale: float,
    sink_logits: torch.Tensor | None,
) -> None:
    """Make slots of the prompt in the prefix, and put its last tokens into the ring of the tail.

    Afterwards the request is one that has seen ``p - shift`` tokens, the first of which are the made slots. A made slot
    has the key of a token before the last ones, a fitted value and a bias. Its position field says which token that is.

    Args:
        pages, row, prefix, after, made_row, scale: as in :func:`compress`.
        queries: ``[H, c, G, D]``, the last queries, all of which see the tokens that slots are made of.
        sink_logits: ``[H, G]`` logits of attention sinks, or None.
    """
    p, n, blocks = int(prefix.tokens[0]), pages.layout.block_slots, prefix.pages
    keys, values = prefix.gather(0, 0, p)
    near, device, row = p - after.shift - after.made_slots, keys.device, row.long()
    slots, newest, heads = (torch.arange(count, device=device) for count in (after.made_slots, near, len(keys)))
    blocks_of_made, heads = made_row.long()[slots // n], heads.unsqueeze(1)
    for part in _parts(len(keys), device):
        q, k, v = (x[part].flatten(1, -2) for x in (queries, keys[:, : p - near], values[:, : p - near]))
        sinks = None if sink_logits is None else sink_logits[part].repeat(1, queries.shape[1])
        chosen, fitted, bias = fit(q, k, v, after.made_slots, scale, Matching(), sinks)
        slots_at = blocks_of_made, heads[part], slots % n
        blocks.k[slots_at], blocks.v[slots_at] = keys[heads[part], chosen], fitted.to(values.dtype)
        blocks.score[slots_at], blocks.position[slots_at] = bias, chosen.int()
    slots_at = row[:, pages.layout.state_blocks + newest // n], heads, newest % n
    pages.k[slots_at], pages.v[slots_at] = keys[:, p - near :], values[:, p - near :]
    pages.score[slots_at], pages.position[slots_at] = 0.0, (newest + p - near).int()
    _set_seen(pages, row, p - after.shift)


def divide(votes: torch.Tensor, budget: int, first: int, safe: float) -> torch.Tensor:
    """Return the budgets ``[H]`` int32 of heads that divide ``H * budget`` slots by votes.

    Each head has ``first`` slots for sinks and window. It retains its ``safe * budget`` best tokens,
    including sinks and window. The other slots go to the tokens with the most votes of all heads; of equal
    votes to the newer token, then to the lower head.

    Args:
        votes: ``[H, c]`` float32, votes for the tokens between sinks and window, oldest first.
        budget: B, the mean budget.
        first: s + w.
        safe: share of the budget that is guaranteed to every head.
    """
    heads, candidates = votes.shape
    room = budget - first
    if candidates <= room:
        return torch.full((heads,), budget, dtype=torch.int32, device=votes.device)
    newest_first = votes.flip(1)
    # sinks and window count towards the guaranteed part
    sure = max(0, int(safe * budget) - first)
    best = newest_first.argsort(dim=1, descending=True, stable=True)[:, :sure]
    # transposed: an index modulo heads is the head, and ties go to the newer token, then to the lower head
    ranking = newest_first.scatter(1, best, torch.inf).T.flatten()
    winners = ranking.argsort(descending=True, stable=True)[: heads * room] % heads
    counts = torch.zeros(heads, dtype=torch.int32, device=votes.device)
    return first + counts.scatter_add_(0, winners, torch.ones_like(winners, dtype=torch.int32))


def pool(pooling: Callable, weights: torch.Tensor, neighbours: int) -> torch.Tensor:
    """Return ``weights [H, n]`` after one of torch's one-dimensional poolings over neighbours, ``[H, n]``."""
    return pooling(weights.unsqueeze(1), neighbours, 1, neighbours // 2).squeeze(1)


def prompt_votes(
    q: torch.Tensor, keys: torch.Tensor, scale: float, votes: PromptVotes, sink_logits: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the votes ``[H, p]`` float32 of the last queries of a prompt for its tokens.

    Args:
        q: ``[H, n, G, D]``, the last n queries.
        keys: ``[H, p, D]``, all keys.
        scale: factor on q . k.
        votes: parameters of the vote.
        sink_logits: ``[H, G]`` logits of attention sinks, or None.

    Returns:
        The votes, 0 for the last n tokens themselves.
    """
    count, p = q.shape[1], keys.shape[1]
    averages = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
    if count == p:
        return averages
    later = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
    for part in _parts(len(keys), keys.device):
        logits = (q[part].float().flatten(1, 2) @ keys[part].float().mT).unflatten(1, q.shape[1:3]) * scale
        logits[..., p - count :].masked_fill_(later.unsqueeze(1), -torch.inf)  # [heads, n, G, p]
        # sinks take their share of the softmax, and their column gets no votes
        if sink_logits is not None:
            sinks = sink_logits[part].view(-1, 1, q.shape[2], 1).expand(-1, count, -1, -1)
            logits = torch.cat([logits, sinks], -1)
        mean = logits.softmax(-1)[..., : p - count].mean((1, 2))
        averages[part, : p - count] = pool(F.avg_pool1d, mean, votes.neighbours)
    return averages


def _parts(heads: int, device: torch.device) -> list[slice]:
    """Return the heads that are computed together: on a CPU each alone, elsewhere all."""
    return [slice(h, h + 1) for h in range(heads)] if device.type == "cpu" else [slice(0, heads)]


def _set_seen(pages: Pages, row: torch.Tensor, count: int) -> None:
    """Write ``tokens_seen`` of all heads of a request with pages ``row [H, P]`` int64."""
    heads = torch.arange(len(row), device=row.device)
    first_slots = row[:, pages.layout.state_blocks], heads, torch.zeros_like(heads)
    pages.put(pages.position, first_slots, torch.full_like(heads, count, dtype=torch.int32))


def _words(
    pages: Pages, states: torch.Tensor, places: torch.Tensor, floats: int, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three indices ``[L, H, floats]`` into ``pages.state`` that select stored queries.

    Args:
        states: ``[L, H, S]`` state blocks.
        places: ``[L]`` indices of the queries.
        floats: number of float32 values per query and KV head.
        first: offset of the queries in the state.
    """
    region, heads = pages.state.shape[-1], torch.arange(states.shape[1], device=places.device)
    # a state may go on in further blocks: word // region is the block, word % region the place in it
    word = first + places.unsqueeze(1) * floats + torch.arange(floats, device=places.device)
    word = word.unsqueeze(1).expand(-1, len(heads), -1)
    return states.long().gather(2, word // region), heads.view(-1, 1).expand_as(word), word % region
