"""Reference verification of drafts in plain torch: ordinary steps, after which the request's blocks are put back."""

import torch

from kvpop_vllm.cache.pages import Pages, StagedDraft
from kvpop_vllm.kernels.reference.decode_step import decode_step
from kvpop_vllm.kernels.reference.paging import check_staged, protected


def verify_step(
    q, k, v, pages, page_table, positions, first_tokens, drafts, budgets, *, rule, scale, gate_scores=None, prefix=None,
    keys=None, windows, sink_logits=None,
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.verify_step`."""
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
    starts, firsts, counts = positions.tolist(), first_tokens.tolist(), drafts.tolist()
    for r, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        if not -1 <= count <= pages.layout.drafts or (count >= 0 and not 0 <= first < len(q) - count):
            raise ValueError(
                f"request {r}: {count} drafts after token {first} of {len(q)} tokens do not fit: at most"
                f" {pages.layout.drafts} can be staged"
            )
    for r, tokens_seen in enumerate(check_staged(pages, page_table, starts, prefix)):
        one, begins = slice(r, r + 1), protected(prefix, r)
        table, own_prefix = page_table[one], None if prefix is None else prefix.of(one)
        of_request = {
            "rule": rule,
            "scale": scale,
            "prefix": own_prefix,
            "keys": None if keys is None else keys[one],
            "windows": windows[one],
            "sink_logits": sink_logits,
        }

        def step(t, *token, scores, table=table, of_request=of_request, r=r):
            place = torch.tensor([t]), budgets[r : r + 1]
            return decode_step(*token, pages, table, *place, gate_scores=scores, **of_request)

        start, first, count = starts[r], firsts[r], counts[r]
        # accepted drafts enter as ordinary steps would have entered them; those below p lie in the prefix already
        for t in range(max(tokens_seen, begins), start):
            *token, scores = _staged(pages, table[0], t - tokens_seen, q)
            step(t, *token, scores=None if gate_scores is None else scores)
        before = None
        for i in range(count + 1):
            row = slice(first + i, first + i + 1)
            scores = None if gate_scores is None else gate_scores[row]
            # the token at c stays, and everything after it is taken back: a copy of all bytes forgets nothing
            if i == 1:
                before = _blocks(pages, table)
            out[row], lse[row] = step(start + i, q[row], k[row], v[row], scores=scores)
        if before is not None:
            blocks, content = before
            _regions(pages)[blocks] = content
        if start + max(count, 0) >= begins:
            cut = slice(first + 1, first + 1 + max(count, 0))
            scores = None if gate_scores is None else gate_scores[cut]
            _stage(pages, table[0], start + 1, q[cut], k[cut], v[cut], scores)
            if start < begins:  # the tail has not begun
                pages.position[table[0, :, pages.layout.state_blocks].long(), torch.arange(k.shape[1]), 0] = start + 1
    return out, lse


def _regions(pages: Pages) -> torch.Tensor:
    """Return the bytes of all blocks, or of all regions where heads use any of them."""
    return pages.raw[:, 0] if pages.raw.stride(1) == 0 else pages.raw


def _blocks(pages: Pages, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of a page table, and a copy of their bytes; entries that are no blocks are not used."""
    blocks = table.unique().long()
    blocks = blocks[(blocks >= 0) & (blocks < pages.num_blocks)]
    return blocks, _regions(pages)[blocks].clone()


def _drafts(pages: Pages, row: torch.Tensor, index: int) -> list[StagedDraft]:
    """Return the staged draft at ``index`` of each head of a request with pages ``row [H, P]``."""
    return [pages.draft(row[h], h, index) for h in range(len(row))]


def _staged(pages: Pages, row: torch.Tensor, index: int, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return query, key, value and gate scores of a staged draft, each as of one token.

    Queries are 0 if none are staged. ``q`` has the shape and the dtype of the queries of some tokens.
    """
    heads = _drafts(pages, row, index)
    k, v, score = (torch.stack([getattr(head, name) for head in heads]).unsqueeze(0) for name in ("k", "v", "score"))
    query = torch.zeros(1, *q.shape[1:], dtype=q.dtype)
    if pages.layout.draft_query_bytes:
        used = query[0].numel() * query.itemsize // len(heads)
        query = torch.stack([head.q[:used] for head in heads]).view(q.dtype).view(query.shape)
    return query, k, v, score[..., 0]


def _stage(pages: Pages, row: torch.Tensor, position: int, q, k, v, scores: torch.Tensor | None) -> None:
    """Stage drafts from ``position`` on, with ``q [d, Hq, D]``, ``k, v [d, H, D]`` and ``scores [d, H]``; drop others."""
    for i in range(min(len(k) + 1, pages.layout.drafts)):
        for h, draft in enumerate(_drafts(pages, row, i)):
            draft.position[:] = position + i if i < len(k) else -1
            if i == len(k):
                continue
            draft.k[:], draft.v[:] = k[i, h], v[i, h]
            draft.score[:] = 0.0 if scores is None else scores[i, h]
            if pages.layout.draft_query_bytes:
                query = q[i].view(len(row), -1)[h].contiguous().view(torch.uint8)
                draft.q[: len(query)] = query
