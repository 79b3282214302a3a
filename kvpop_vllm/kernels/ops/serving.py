"""Schemas of the serving ops; axes in :mod:`kvpop_vllm.kernels.ops`."""

import functools
from collections.abc import Callable, Sequence

import torch

from kvpop_vllm.cache.chunks import Chunks
from kvpop_vllm.cache.device_rows import DeviceRows
from kvpop_vllm.cache.pages import Pages, Prefix
from kvpop_vllm.kernels.dispatch import chosen, resolve
from kvpop_vllm.kernels.draws import head_keys
from kvpop_vllm.kernels.ops.rules import RetentionRule

WRITE_TO_OUT = {"triton": ("decode_step", "verify_step", "prefill_chunk"), "cpp": ("decode_step", "verify_step")}
"""Ops whose implementation writes outputs to ``out``; those of other ones are copied there."""


def decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    budgets: torch.Tensor,
    *,
    rule: RetentionRule,
    scale: float,
    gate_scores: torch.Tensor | None = None,
    prefix: Prefix | None = None,
    seeds: torch.Tensor | None = None,
    windows: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance each of R requests by one token: update state, score, evict, insert and attend.

    For each request and head, with q the token's position, in this order (DESIGN "Pages", KVpop Figure 3):

    1. The scorer's state is updated with ``x_q = [k_q; v_q]``. Before token 0 the state is initialised.
    2. The token ``u = q - w`` leaving the window (if ``u >= s``) is scored with the updated state.
    3. u is copied from its ring slot into the first free long-range slot. If none is free, it replaces the
       long-range token of lowest effective score, or is dropped if its own is the lowest.
    4. Token q is written into its sink slot, or into ring slot ``s + (q - s) % w``, the slot of u.
    5. Attention runs over the slots in use, ``[0, min(q + 1, B))`` or fewer with a threshold.

    If scores come from attention, the query's weights are written to the score fields at the end, or added to
    them. A gate score is stored in its token's score field at insertion.

    A request with a protected prefix of p tokens also attends to these tokens. Its slots are those of the tail
    (:class:`kvpop_vllm.roles.Retention`). The tail begins again at ``q = p``: earlier slot contents are ignored, except
    the scorer's state, which :func:`begin_tail` has built. A token below p is stored in the prefix pages already, but
    for the Triton implementation, which writes it there. It attends to the tokens up to itself, and nothing else is
    written. The first ``biased`` tokens of a prefix may have a bias per KV head, stored in their score fields: it is
    added to their scaled logits, so that outputs, log-sum-exps and attention masses follow from it (:class:`Prefix`).

    Args:
        q: ``[R, Hq, D]``, last axis contiguous.
        k, v: ``[R, H, D]`` in the cache's dtype, last axis contiguous.
        pages: the layer's cache. It is written in place.
        page_table: ``[R, H, P]`` int32 block numbers, state blocks first; stride 0 over heads is allowed.
        positions: ``[R]`` int64, position of each request's token.
        budgets: ``[R, H]`` int32, B of each head.
        rule: retention rule of the layer.
        scale: factor on q . k.
        gate_scores: ``[R, H]`` float32, gate scores of the tokens if the rule's scorer takes them, else
            ignored.
        prefix: protected tokens of the R requests, or None if no request has any.
        seeds: ``[R]`` int64, seeds of the requests' draws if the rule's scorer draws, else
            ignored.
        windows: ``[R]`` int32, w of each request, by default the rule's.
        sink_logits: ``[Hq]`` float32 on q's device, contiguous, or None for a model without attention sinks. A query
            head's sink is one more key with this logit and a value of 0, which no slot holds. Outputs, log-sum-exps
            and attention masses follow from it.
        out: ``[R, Hq, D]`` in q's dtype, contiguous, written and returned, None for a new tensor.
        impl: implementation.

    Returns:
        ``out [R, Hq, D]`` in q's dtype, corrected if the rule says so, and ``lse [R, Hq]`` float32, the
            natural log-sum-exp of the scaled logits over the retained tokens and the sink.

    Raises:
        StepOrderError: some request's ``positions`` differs from its ``tokens_seen``; nothing has been
            written. The Triton implementation does not wait for the device. It returns NaN for that request
            instead and leaves its pages unchanged; a position of -1 is padding.
        ValueError: gate scores or seeds that the rule needs are missing or have the wrong shape, or logits of sinks
            have. In C++ also numbers of biased tokens that are negative or exceed the prefix.
    """
    run = _writing(out, "decode_step", impl, q)
    _check_sinks(sink_logits, q)
    rule, options = _inputs_of(rule, k, v, gate_scores, seeds, (len(k),))
    if windows is None:
        windows = torch.full((len(k),), rule.window, dtype=torch.int32, device=k.device)
    options |= {"windows": windows, "sink_logits": sink_logits}
    return run(q, k, v, pages, page_table, positions, budgets, rule=rule, scale=scale, prefix=prefix, **options)


def _writing(out: torch.Tensor | None, op: str, impl: str, q: torch.Tensor) -> Callable:
    """Return the implementation of an op, which writes its outputs to ``out``."""
    impl = chosen(op, impl, q)
    run = resolve(op, impl, q)
    if out is None:
        return run
    if op in WRITE_TO_OUT.get(impl, ()):
        return functools.partial(run, out=out)

    def copied(*args, **options):
        outputs, lse = run(*args, **options)
        return out.copy_(outputs), lse

    return copied


def verify_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    first_tokens: torch.Tensor,
    drafts: torch.Tensor,
    budgets: torch.Tensor,
    *,
    rule: RetentionRule,
    scale: float,
    gate_scores: torch.Tensor | None = None,
    prefix: Prefix | None = None,
    seeds: torch.Tensor | None = None,
    windows: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance each of R requests by one token, and show its drafts what they would see if they were accepted.

    A request brings a token at position c, which is accepted, and d <= m drafts at ``c + 1 .. c + d``. The drafts of
    its previous step are staged in its pages (:class:`kvpop_vllm.cache.pages.PageLayout`). For each request and head:

    1. **Commit.** The ``c - tokens_seen`` first staged drafts have been accepted. Each enters the cache by an ordinary
       step (:func:`decode_step`), without outputs. The other staged drafts are dropped.
    2. **Token.** The token at c takes an ordinary step.
    3. **Drafts.** The d drafts take ordinary steps. Then pages are put back to the bit: slots, scores, positions,
       state, moments and counts.
    4. **Stage.** The drafts' keys, values, gate scores, and queries if the rule reads attention, are staged.

    Then ``tokens_seen = c + 1``, and outputs and pages are those of ordinary steps. Between steps pages hold drafts in
    the staging region alone, so that a request may end, be preempted or be copied at any time. Staged drafts are
    dropped by :func:`decode_step` and :func:`prefill_chunk`, which know nothing of them, and by a step at or below p.

    A request with ``drafts = -1`` brings no token: step 1 runs alone, and ``tokens_seen = c``. This comes before a
    chunk of prefill that begins at c. A request whose drafts have all been refused, or that has none, has d = 0.

    Of a request with a prefix, all tokens below p, drafts included, are stored in the prefix pages before, as for
    :func:`decode_step`; the caller writes them again when it knows better. Only tokens from p on are staged or taken
    back. Call :func:`begin_tail` before a step with ``c <= p <= c + d``, once the tokens below p are written. If drafts
    below p are refused, the next step begins at or below p, and so it is called again; a step at c > p must not be
    preceded by it.

    Rounds and the compression of a prompt lie between two steps, so the caller cuts drafts there. A token after which a
    round is due, or at which a prompt is compressed, is the token at c of its step, without drafts.

    Args:
        q: ``[T, Hq, D]``, last axis contiguous.
        k, v: ``[T, H, D]`` in the cache's dtype, last axis contiguous.
        pages: the layer's cache, whose layout has ``drafts`` and ``draft_query_bytes``. It is written in place.
        page_table: ``[R, H, P]`` int32 block numbers, state blocks first; stride 0 over heads is allowed.
        positions: ``[R]`` int64, c of each request.
        first_tokens: ``[R]`` int64, index in ``[0, T)`` of the token at c, which its drafts follow.
        drafts: ``[R]`` int32, d of each request, or -1.
        budgets: ``[R, H]`` int32, B of each head.
        rule: retention rule of the layer.
        scale: factor on q . k.
        gate_scores: ``[T, H]`` float32, as in :func:`decode_step`.
        prefix: protected tokens of the R requests, with its ``tokens`` and ``biased`` as in :func:`decode_step`, or
            None.
        seeds: ``[R]`` int64, as in :func:`decode_step`.
        windows: ``[R]`` int32, w of each request, by default the rule's.
        sink_logits: ``[Hq]`` float32, as in :func:`decode_step`.
        out: ``[T, Hq, D]``, as in :func:`decode_step`.
        impl: implementation.

    Returns:
        ``out [T, Hq, D]`` in q's dtype, and ``lse [T, Hq]`` float32, as in :func:`decode_step`. A token that belongs to
            no request has outputs 0 and log-sum-exps of -inf.

    Raises:
        StepOrderError: not ``tokens_seen <= c <= tokens_seen + staged`` for some request with c > p; nothing has been
            written. The Triton implementation returns NaN for that request instead, as :func:`decode_step` does.
        ValueError: as in :func:`decode_step`; d exceeds m or tokens lie outside of ``[0, T)``; or the layout has no
            room for the rule's queries.
        NotImplementedError: in Triton, a rule that reads attention, keeps queries or corrects outputs. It also takes m <= w alone
            (ValueError, by the rule's w), because a draft must not leave the window before it is accepted. A request
            with more drafts than its own w gets NaN, and nothing is written for it.
    """
    run = _writing(out, "verify_step", impl, q)
    _check_sinks(sink_logits, q)
    rule, options = _inputs_of(rule, k, v, gate_scores, seeds, (len(positions),))
    if windows is None:
        windows = torch.full((len(positions),), rule.window, dtype=torch.int32, device=k.device)
    needed = rule.draft_query_bytes(q.shape[1] // k.shape[1], k.shape[2], q.dtype)
    if pages.layout.draft_query_bytes < needed:
        raise ValueError(
            f"the layout stages {pages.layout.draft_query_bytes} bytes of queries, the rule needs {needed}"
        )
    options |= {"windows": windows, "sink_logits": sink_logits, "rule": rule, "scale": scale, "prefix": prefix}
    return run(q, k, v, pages, page_table, positions, first_tokens, drafts, budgets, **options)


def _check_sinks(sink_logits: torch.Tensor | None, q: torch.Tensor) -> None:
    """Check logits of attention sinks.

    Raises:
        ValueError: they have another shape, dtype, device or layout than the ops take.
    """
    if sink_logits is None:
        return
    form = sink_logits.shape, sink_logits.dtype, sink_logits.device, sink_logits.is_contiguous()
    if form != (q.shape[1:2], torch.float32, q.device, True):
        raise ValueError(f"sink_logits must be contiguous float32 {tuple(q.shape[1:2])} on {q.device}, got {form}")


def _inputs_of(rule: RetentionRule, k, v, gate_scores, seeds, requests: tuple[int, ...]) -> tuple[RetentionRule, dict]:
    """Return the rule as the kernels take it, and the arguments that depend on its scorer.

    These are ``gate_scores``, and ``keys [R, H]`` of draws. An argument that the rule does not need is None. A
    scorer without a kernel scores the tokens here.

    Raises:
        ValueError: a needed argument is missing or has the wrong shape.
    """
    scorer = rule.scorer
    if scorer.takes_gate_scores:
        _check_shape("gate_scores", gate_scores, k.shape[:2], scorer)
    if rule.draws:
        _check_shape("seeds", seeds, requests, scorer)
    if scorer.kernel is None:
        rule, gate_scores = rule.as_gate_scores, scorer.scores(k.transpose(0, 1), v.transpose(0, 1)).T.contiguous()
    elif not scorer.takes_gate_scores:
        gate_scores = None
    return rule, {"gate_scores": gate_scores, "keys": head_keys(seeds, scorer.lanes) if rule.draws else None}


def _check_shape(name: str, value: torch.Tensor | None, shape: tuple[int, ...], scorer) -> None:
    """Raise ValueError if an argument that a scorer needs is missing or has another shape."""
    if value is None or value.shape != shape:
        got = None if value is None else tuple(value.shape)
        raise ValueError(f"{name} must be {tuple(shape)} for {type(scorer).__name__}, got {got}")


def prefill_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    chunks: Chunks,
    *,
    rule: RetentionRule,
    scale: float,
    gate_scores: torch.Tensor | None = None,
    prefix: Prefix | None = None,
    seeds: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Process a chunk of L_r tokens of each of R requests, T tokens in all (DESIGN "One step").

    The result equals L_r decode steps of each request up to rounding. Each query sees the slots retained before its
    chunk and the chunk's own tokens, under its own cutoff. Afterwards the survivors are written into the slots. Memory
    is bounded by B slots plus the chunks. If the rule is ``sequential``, the tokens of a request are processed one by
    one.

    Args:
        q: ``[T, Hq, D]``, last axis contiguous; the chunks lie one after another.
        k, v: ``[T, H, D]`` in the cache's dtype, last axis contiguous.
        pages: the layer's cache. It is written in place.
        page_table: ``[R, H, P]`` int32 block numbers, state blocks first.
        chunks: start, length, budgets and window of each chunk.
        rule: retention rule of the layer; the chunks' windows count.
        scale: factor on q . k.
        gate_scores: ``[T, H]`` float32, as in :func:`decode_step`.
        prefix: protected tokens of the R requests, with its ``tokens`` and ``biased`` on the CPU, or None. Biases
            count as in :func:`decode_step`.
        seeds: ``[R]`` int64, as in :func:`decode_step`.
        sink_logits: ``[Hq]`` float32, as in :func:`decode_step`.
        out: ``[T, Hq, D]``, as in :func:`decode_step`.
        impl: implementation.

    Returns:
        ``out [T, Hq, D]`` in q's dtype, and ``lse [T, Hq]`` float32, as in :func:`decode_step`.

    Raises:
        StepOrderError: a chunk's start differs from ``tokens_seen``; neither it nor a later chunk has been written. The
            Triton implementation returns NaN for that request instead, as :func:`decode_step` does.
        ValueError: as in :func:`decode_step`.
    """
    run = _writing(out, "prefill_chunk", impl, q)
    _check_sinks(sink_logits, q)
    rule, options = _inputs_of(rule, k, v, gate_scores, seeds, (len(chunks),))
    options["sink_logits"] = sink_logits
    return run(q, k, v, pages, page_table, chunks, rule=rule, scale=scale, prefix=prefix, **options)


def write_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Write keys and values of n tokens of a batch to their slots, for all heads.

    Args:
        k, v: ``[T, H, D]`` in the cache's dtype, last axis contiguous.
        pages: the layer's cache; written in place.
        tokens: ``[n]`` int64 indices in the batch.
        blocks: ``[n]`` int64 block of each.
        slots: ``[n]`` int64 slot of each in its block.
        impl: implementation.
    """
    resolve("write_tokens", impl, k)(k, v, pages, tokens, blocks, slots)


def fill_rows(
    rows: DeviceRows,
    count: int,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    firsts: torch.Tensor | None = None,
    decodes: int | None = None,
    *,
    impl: str = "auto",
) -> None:
    """Fill the first R rows of a step's decoded requests, with operations on the device only.

    A row is padding if the engine gives it no length or no tokens, if its first token has no slot (-1), or if it
    has no block. The block is the prefix block of a protected token, otherwise the block of the first slot of
    the tail. Such rows occur after the requests of a captured batch, in dummy runs, and in warm-ups with
    blocks for keys and values only.

    Args:
        rows: tensors of the rows, which are written, and the numbers of the requests, which are read.
        count: R.
        lengths: ``[>= R]`` integers, length of each request with the new tokens.
        block_table: ``[>= R, W]`` int32, rows contiguous, blocks of each request's prefix, state and tail.
        slot_mapping: ``[T]`` int64, -1 if a token has no slot; other values are not used. Without ``firsts`` T >= R.
        firsts: ``[> R]`` int32, index of each request's first token, and their number; without speculative
            decoding None, which stands for a token of each request.
        decodes: number of rows that are decoded, by default all. The others have chunks that are computed after the
            step: of them, what is staged enters the cache.
        impl: implementation.
    """
    resolve("fill_rows", impl, rows.table)(rows, count, lengths, block_table, slot_mapping, firsts, decodes)


def begin_tail(
    pages: Pages, page_table: torch.Tensor, prefix: Prefix, *, rule: RetentionRule, impl: str = "auto"
) -> None:
    """Build the scorer's state of R requests from the last ``rule.replay`` tokens of their prefixes.

    The state is updated with tokens ``[max(made, p - R), p)``, without readouts (DESIGN "A prefix and a tail").
    Cartridge slots carry no tokens, so the state is empty after them.
    Call this before the step that has token p; it may be called again. Requests without protected tokens, and
    rules without a recurrent scorer, are left unchanged.

    Args:
        pages: the tail's cache; state is written in place.
        page_table: ``[R, H, P]`` int32 block numbers, state blocks first.
        prefix: prefix of the R requests, with all tokens below p written and its ``tokens`` on the CPU.
        rule: retention rule of the layer.
        impl: implementation.
    """
    if rule.replays:
        resolve("begin_tail", impl, pages.k)(pages, page_table, prefix, rule=rule)


def online_topk(
    score: torch.Tensor,
    position: torch.Tensor,
    retained: int,
    *,
    topk: int | Sequence[int],
    window: int,
    log_gamma: torch.Tensor,
    decay_step: int = 1,
    ages: bool = False,
    keys: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Return the time at which each token is evicted from k long-range slots.

    Tokens arrive one by one, and evictions are permanent. The first ``retained`` tokens are in the slots already,
    in any order. The others arrive in order of position, token t at ``q = t + window``. If an arrival makes
    more than k tokens, the token with the lowest effective score at q is evicted.

    Args:
        score: ``[H, T]`` float32 raw scores.
        position: ``[H, T]`` int64; the positions of the arrivals increase by one.
        retained: number of tokens in the slots at the start.
        topk: k, or k of each head; heads that differ are simulated one after another.
        window: w.
        log_gamma: ``[H]`` float64.
        decay_step: n.
        ages: if True, a token's score is multiplied by its age.
        keys: ``[H]`` int64, keys of draws that replace the scores, or None.
        impl: implementation.

    Returns:
        ``evicted_at [H, T]`` int64: the first query position that does not see the token, or
            ``torch.iinfo(int64).max``.

    Raises:
        ValueError: not one k for each head; ``retained`` exceeds the number of tokens or slots; ``window`` is not
            in [1, 2**29], so that times of the first 2**30 positions fit 31 bits; or ``decay_step`` is not in
            [1, 2**31 - 1].
    """
    if not isinstance(topk, int) and len(topk) != len(score):
        raise ValueError(f"online_topk needs topk, or one for each of {len(score)} heads, got {len(topk)}")
    if not isinstance(topk, int) and len(set(topk)) == 1:
        topk = topk[0]
    if not isinstance(topk, int):
        rows = zip(score.split(1), position.split(1), topk, log_gamma.split(1), strict=True)
        options = {"window": window, "decay_step": decay_step, "ages": ages, "impl": impl}
        drawn = [None] * len(score) if keys is None else keys.split(1)
        return torch.cat(
            [
                online_topk(*row, retained, topk=slots, log_gamma=decay, keys=key, **options)
                for (*row, slots, decay), key in zip(rows, drawn, strict=True)
            ]
        )
    if not 0 <= retained <= min(topk, score.shape[-1]):
        raise ValueError(
            f"online_topk needs 0 <= retained <= min(topk, T), got {retained}, {topk} and {score.shape[-1]}"
        )
    limits = {"window": (window, 2**29), "decay_step": (decay_step, 2**31 - 1)}
    for name, (tokens, limit) in limits.items():
        if not 1 <= tokens <= limit:
            raise ValueError(f"online_topk needs {name} in [1, {limit}], got {tokens}")
    options = {"log_gamma": log_gamma, "decay_step": decay_step, "ages": ages, "keys": keys}
    return resolve("online_topk", impl, score)(score, position, retained, topk=topk, window=window, **options)
