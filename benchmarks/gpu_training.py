"""Training kernels on a GPU: correctness in low precision, and times at 16,384 tokens.

Times are beside those of SDPA and FlexAttention and beside their floors. The rank order is random, so the k
long-range tokens of a query lie anywhere, as those of a scorer do: no block of keys is skipped until queries
are far away. SDPA attends to all tokens. FlexAttention gets the same mask as a function of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from gpu import HEADS, KV_HEADS, SIZE, Bench, Case, within
from gpu_clock import bandwidth, paired, seconds
from kernels.naive import future_mass, kept_sets, masked_attention, visible_keys

from kvpop_vllm.kernels import ops

SINKS, WINDOW = 4, 512


def training_kernels(bench: Bench) -> Iterator[Case]:
    """Yield cases; see :data:`gpu.Section`."""
    right = "{} is right".format
    checks = dict(
        running_topk=topk_right,
        sparse_attention=attention_right,
        future_attention_mass=mass_right,
        delayed_mlstm=mlstm_right,
    )
    for op, check in checks.items():
        yield Case(right(op), check)
    attention = right("running_topk"), right("sparse_attention")
    scorer = right("delayed_mlstm"), right("future_attention_mass"), right("running_topk")
    for length, topk in ((16384, 1532), (16384, 3580)):
        for what, times, needs in (("attention", attention_times, attention), ("scorer", scorer_times, scorer)):
            yield Case(f"{what}, S {length}, k {topk}", partial(times, length=length, topk=topk), needs)


def _draw(bench: Bench, seed: int, *shape: int, dtype=None) -> torch.Tensor:
    """Return random numbers that are the same on every device."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(bench.device, dtype or bench.dtype)


def _qkv(bench: Bench, length: int, size: int, group: int) -> list[torch.Tensor]:
    return [_draw(bench, i, 1, heads, length, size) for i, heads in ((1, 2 * group), (2, 2), (3, 2))]


def topk_right(bench: Bench) -> Iterator[dict]:
    """Check that the retained sets are those of a sort for every query."""
    priority = _draw(bench, 0, 2, 2, 77 if bench.small else 300, dtype=torch.float32)
    options = dict(sinks=3, window=9, topk=11)
    rank, cutoff = (x.cpu() for x in ops.running_topk(priority, **options, impl="triton"))
    same = visible_keys(rank, cutoff, 3, 9) == kept_sets(priority.cpu(), *options.values())
    assert same.all(), f"{int((~same).sum())} of {same.numel()} differ"
    yield bench.row("sets that differ", 0, "count")


def attention_right(bench: Bench) -> Iterator[dict]:
    """Check outputs, log-sum-exps and all gradients."""
    sizes = ((77, 16, 2),) if bench.small else ((300, 64, 3), (300, 128, 4), (513, 80, 1))
    for length, size, group in sizes:
        inputs, priority = _qkv(bench, length, size, group), _draw(bench, 0, 1, 2, length, dtype=torch.float32)
        options = dict(sinks=3, window=9, topk=11)
        visible = kept_sets(priority.cpu(), *options.values()).to(bench.device)
        order = ops.running_topk(priority, **options, impl="triton")
        grad, scale = _draw(bench, 4, *inputs[0].shape), size**-0.5

        def sparse(*x, order=order, scale=scale):
            return ops.sparse_attention(*x, *order, sinks=3, window=9, scale=scale, impl="triton")

        def masked(*x, visible=visible, scale=scale):
            return masked_attention(*x, visible, scale)

        runs = (sparse, bench.dtype), (masked, torch.float64), (masked, bench.dtype)
        results = [_complete(run, inputs, grad, dtype) for run, dtype in runs]
        for name, *three in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
            yield from within(bench, *three, f"{name}, D {size}, G {group}")


def _complete(run, inputs, grad, dtype):
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out, lse = run(*leaves)
    return out, lse, *torch.autograd.grad(out, leaves, grad.to(dtype))


def mass_right(bench: Bench) -> Iterator[dict]:
    """Check masses with and without a look-ahead."""
    length, size = (70, 16) if bench.small else (700, 128)
    q, k, _ = _qkv(bench, length, size, 2)
    lse = 3 + _draw(bench, 5, *q.shape[:3], dtype=torch.float32)
    for lookahead in (None, 13):
        options = dict(window=9, scale=size**-0.5, lookahead=lookahead)
        actual = ops.future_attention_mass(q, k, lse, **options, impl="triton")
        exact, eager = (
            future_mass(q.to(d), k.to(d), lse.to(d), *options.values()) for d in (torch.float64, bench.dtype)
        )
        yield from within(bench, actual, exact, eager, f"mass, look-ahead {lookahead}")


def mlstm_right(bench: Bench) -> Iterator[dict]:
    """Check outputs and gradients against the chunkwise reference in float64.

    Inputs are first rounded to the low precision.
    """
    length, features, width, delay = (45, 16, 16, 9) if bench.small else (700, 64, 128, 64)
    q, k = (_draw(bench, i, 1, 2, length, features).abs() for i in (1, 2))
    v, igate, fgate = (_draw(bench, i, 1, 2, length, *more) for i, more in ((5, (width,)), (3, ()), (4, ())))
    inputs, grad = (q, k, v, igate, fgate + 2), _draw(bench, 9, 1, 2, length, width, dtype=torch.float32)

    def complete(impl, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        h, _ = ops.delayed_mlstm(*leaves, delay=delay, chunk=16, impl=impl)
        return h, *torch.autograd.grad(h, leaves, grad.to(h.dtype))

    actual, exact = complete("triton", bench.dtype), complete("reference", torch.float64)
    eager = complete("reference", bench.dtype)
    for name, *three in zip(("h", "dq", "dk", "dv", "di", "df"), actual, exact, eager, strict=True):
        yield from within(bench, *three, f"mlstm {name}")


def attention_times(bench: Bench, length: int, topk: int) -> Iterator[dict]:
    """Yield times of forward, and of forward with backward, in turn with SDPA and FlexAttention.

    The floor of sparse attention is the visible logits at the rate that SDPA reaches on all logits.
    """
    q, k, v = (_draw(bench, i, 1, heads, length, SIZE) for i, heads in ((1, HEADS), (2, KV_HEADS), (3, KV_HEADS)))
    priority, scale = _draw(bench, 0, 1, KV_HEADS, length, dtype=torch.float32), SIZE**-0.5
    rank, cutoff = ops.running_topk(priority, sinks=SINKS, window=WINDOW, topk=topk, impl="triton")
    flex = compiled_flex(rank, cutoff, length, WINDOW)

    def sparse(*x):
        return ops.sparse_attention(*x, rank, cutoff, sinks=SINKS, window=WINDOW, scale=scale, impl="triton")[0]

    runs = {"sparse": sparse, "SDPA": dense, "FlexAttention": flex}
    check_same("sparse_attention", sparse(q, k, v), flex(q, k, v))
    share = visible_share(length, SINKS + WINDOW + topk)
    leaves, grad = [x.detach().requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    for what, of in (
        ("forward", lambda run: run(q, k, v)),
        ("forward and backward", lambda run: torch.autograd.grad(run(*leaves), leaves, grad)),
    ):
        times = paired({name: partial(of, run) for name, run in runs.items()})
        for name, value in times.items():
            floor = 1e3 * times["SDPA"] * share if name == "sparse" else None
            yield bench.row(f"{name}, {what}", 1e3 * value, "ms", floor)


def dense(q, k, v) -> torch.Tensor:
    """Return attention to all tokens, by SDPA."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SIZE**-0.5, enable_gqa=True)


def check_same(op: str, own: torch.Tensor, flex: torch.Tensor) -> None:
    """Check that the outputs of an op are those of FlexAttention.

    Raises:
        AssertionError: they are not.
    """
    error = float((own.float() - flex.float()).abs().max())
    assert error < 0.02, f"{op} and FlexAttention differ by {error:.3g}"


def visible_share(length: int, budget: int) -> float:
    """Return the share of causal logits that are visible when a query sees at most ``budget`` tokens."""
    held = torch.arange(1, length + 1).clamp_max(budget).double().mean()
    return float(held / ((length + 1) / 2))


def compiled_flex(rank, cutoff, length: int, window: int):
    """Return FlexAttention compiled for the mask of ``rank`` and ``cutoff`` ``[1, H, S]``.

    Its list of blocks is made beforehand.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    group = HEADS // KV_HEADS

    def visible(batch, head, query, key):
        kv_head = head // group
        kept = (key < SINKS) | (key > query - window) | (rank[batch, kv_head, key] <= cutoff[batch, kv_head, query])
        return kept & (key <= query)

    blocks = create_block_mask(visible, 1, HEADS, length, length, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=blocks, scale=SIZE**-0.5, enable_gqa=True)


def scorer_times(bench: Bench, length: int, topk: int) -> Iterator[dict]:
    """Yield times of a layer's scorer: mLSTM forward and backward, order, targets.

    The floor is its tensors read and written once at the bandwidth of a copy.
    """
    speed = bandwidth()
    q, k = (_draw(bench, i, 1, KV_HEADS, length, SIZE // 2).abs() for i in (1, 2))
    v, igate, fgate = (_draw(bench, i, 1, KV_HEADS, length, *more) for i, more in ((5, (SIZE,)), (3, ()), (4, ())))
    inputs = [x.requires_grad_() for x in (q, k, v, igate, fgate)]
    grad = _draw(bench, 9, *v.shape, dtype=torch.float32)

    def scores():
        return ops.delayed_mlstm(*inputs, delay=WINDOW, impl="triton")[0]

    bytes_in, bytes_out = sum(x.numel() * x.element_size() for x in inputs), 4 * grad.numel()
    floor = 1e3 * (bytes_in + bytes_out) / speed
    yield bench.row("delayed_mlstm, forward", 1e3 * seconds(scores), "ms", floor)
    both = seconds(lambda: torch.autograd.grad(scores(), inputs, grad))
    yield bench.row(
        "delayed_mlstm, forward and backward", 1e3 * both, "ms", 1e3 * (3 * bytes_in + 2 * bytes_out) / speed
    )
    priority = _draw(bench, 0, 1, KV_HEADS, length, dtype=torch.float32)
    order = seconds(lambda: ops.running_topk(priority, sinks=SINKS, window=WINDOW, topk=topk, impl="triton"))
    yield bench.row("running_topk", 1e3 * order, "ms", 1e3 * 3 * 4 * priority.numel() / speed)
    queries, keys = (_draw(bench, i, 1, heads, length, SIZE) for i, heads in ((1, HEADS), (2, KV_HEADS)))
    lse = 9 + _draw(bench, 5, 1, HEADS, length, dtype=torch.float32)
    mass = seconds(
        lambda: ops.future_attention_mass(queries, keys, lse, window=WINDOW, scale=SIZE**-0.5, impl="triton")
    )
    yield bench.row("future_attention_mass", 1e3 * mass, "ms")
