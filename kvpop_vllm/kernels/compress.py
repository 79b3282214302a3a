"""Compression of a prompt at its end (SnapKV, arXiv:2404.14469): its last queries vote once for what the tail keeps of it.

Runs once a request and layer, by torch's own operations on any device.
"""

from __future__ import annotations

import torch

from kvpop_vllm.kernels.ops import PromptVotes, RetentionRule
from kvpop_vllm.kernels.pages import Pages, Prefix

LEAST_VOTE = torch.finfo(torch.float32).tiny
"""Stands for 0, whose logarithm no score word could hold."""


def hold_queries(q: torch.Tensor, pages: Pages, state: torch.Tensor, first: int) -> None:
    """Write the prompt's last queries to the request's state, as they come.

    Args:
        q: ``[L, Hq, D]``. pages: the tail's; state is written in place. state: ``[H, S]`` block numbers of the state.
        first: number of the first of them among those that vote.
    """
    heads = pages.layout.num_kv_heads
    words = q.transpose(0, 1).unflatten(0, (heads, -1)).transpose(1, 2).reshape(heads, -1).float()  # [H, L * G * D]
    at = torch.arange(words.shape[1], device=q.device) + first * (words.shape[1] // len(q))
    pages.put(pages.state, _words(pages, state, at), words)


def compress(
    pages: Pages,
    row: torch.Tensor,
    prefix: Prefix,
    budgets: torch.Tensor,
    window: int,
    *,
    group: int,
    rule: RetentionRule,
    scale: float,
) -> None:
    """Fill a tail with what is kept of the prompt that lies in the prefix: afterwards it is that of an unprotected request which has
    seen p tokens.

    The last ``n = min(32, w)`` queries' attention to the tokens before them is averaged over queries and query heads and over
    five neighbours. Sinks, the last w tokens and the ``B - s - w`` tokens of most votes stay; of equal votes the newer. A token's
    score is the logarithm of its votes, so that it is below that of every token that leaves the window later, 0.

    Args:
        pages: the tail's cache, written in place. row: ``[H, P]`` int32, its pages, state first, whose state holds the queries.
        prefix: of this request, R = 1, all p tokens written, its ``tokens`` on the CPU. budgets: ``[H]`` int32. window: w.
        group: query heads of a KV head here. rule: with votes. scale: factor on q . k.
    """
    p, heads = int(prefix.tokens[0]), pages.layout.num_kv_heads
    keys, values = prefix.gather(0, 0, p)
    voters = _queries(pages, row, rule.votes.queries, min(rule.votes.queries, window, p), group)
    votes = prompt_votes(voters, keys, scale, rule.votes)
    sinks, table = rule.sinks, row.long()
    oldest = max(sinks, p - window)
    near = torch.cat([torch.arange(min(sinks, p)), torch.arange(oldest, max(oldest, p))]).to(keys.device)
    slots = torch.where(near < sinks, near, sinks + (near - sinks) % window)
    for h in range(heads):
        candidates = votes[h, sinks:oldest]
        room = int(budgets[h]) - sinks - window
        # stable, from the newest on: of equal votes the newer stays
        order = candidates.flip(0).argsort(descending=True, stable=True)[:room]
        kept = (len(candidates) - 1 - order).sort().values + sinks
        tokens = torch.cat([near, kept])
        places = torch.cat([slots, sinks + window + torch.arange(len(kept), device=keys.device)])
        columns = pages.layout.state_blocks + places // pages.layout.block_slots
        at = table[h, columns], torch.full_like(places, h), places % pages.layout.block_slots
        pages.put(pages.k, at, keys[h, tokens])
        pages.put(pages.v, at, values[h, tokens])
        score = torch.zeros(len(tokens), dtype=torch.float32, device=keys.device)
        score[len(near) :] = votes[h, kept].clamp_min(LEAST_VOTE).log()
        pages.put(pages.score, at, score)
        pages.put(pages.position, at, tokens.int())
        zero = tuple(x[:1] for x in (table[h, pages.layout.state_blocks :], at[1], torch.zeros_like(places)))
        pages.put(pages.position, zero, torch.full_like(zero[2], p, dtype=torch.int32))  # tokens_seen


def prompt_votes(q: torch.Tensor, keys: torch.Tensor, scale: float, votes: PromptVotes) -> torch.Tensor:
    """Return the votes ``[H, p]`` float32 of queries ``q [H, n, G, D]``, the last n of the prompt, for its tokens, of which
    ``keys [H, p, D]`` are the keys; 0 for the last n themselves."""
    count, p = q.shape[1], keys.shape[1]
    found = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
    if count == p:
        return found
    later = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
    for h in range(len(keys)):
        logits = q[h].float() @ keys[h].float().T * scale  # [n, G, p]
        logits[..., p - count :].masked_fill_(later.unsqueeze(1), -torch.inf)
        mean = logits.softmax(-1)[..., : p - count].mean((0, 1))
        pooled = torch.nn.functional.avg_pool1d(mean.view(1, 1, -1), votes.neighbours, 1, votes.neighbours // 2)
        found[h, : p - count] = pooled.flatten()
    return found


def _queries(pages: Pages, row: torch.Tensor, most: int, count: int, group: int) -> torch.Tensor:
    """Return the queries ``[H, count, G, D]`` that :func:`hold_queries` has written, the last ones of ``most``."""
    size = pages.layout.head_size
    each = group * size
    at = torch.arange(count * each, device=row.device) + (most - count) * each
    blocks, heads, words = _words(pages, row[:, : pages.layout.state_blocks], at)
    return pages.state[blocks, heads, words].unflatten(1, (count, group, size))


def _words(pages: Pages, state: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where words ``at [n]`` of the heads' states lie in ``pages.state``."""
    region = pages.state.shape[-1]
    heads = torch.arange(len(state), device=at.device).unsqueeze(1).expand(-1, len(at))
    return state.long()[:, at // region], heads, (at % region).expand(len(state), -1)
