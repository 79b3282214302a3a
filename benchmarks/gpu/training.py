"""Training kernels on a GPU: correctness in low precision, and times at 16,384 tokens.

Times are next to those of SDPA and FlexAttention and next to their floors. The rank order is random, so the k
long-range tokens of a query lie anywhere, as those of a scorer do: no block of keys is skipped until queries
are far away. SDPA attends to all tokens. FlexAttention gets the same mask as a function of ranks.
"""

from collections.abc import Iterator
from functools import partial

import torch
from kernels.naive import future_mass, kept_sets, masked_attention, visible_keys

from gpu.clock import bandwidth, milliseconds
from gpu.sections import HEADS, KV_HEADS, SIZE, Bench, Case, within
from kvpop_vllm.distill.listwise import listwise_loss
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.kernels import ops
from kvpop_vllm.roles import Retention

SINKS, WINDOW, LENGTH = 4, 512, 16384


def cases(bench: Bench) -> Iterator[Case]:
    """Yield the cases of the section."""
    right = "{} is right".format
    checks = dict(sparse_attention=attention_right, future_attention_mass=mass_right, delayed_mlstm=mlstm_right)
    for op, check in checks.items():
        yield Case(right(op), check)
    scorer = right("delayed_mlstm"), right("future_attention_mass"), right("sparse_attention")
    for topk in (1532, 3580):
        yield Case(f"attention, S {LENGTH}, k {topk}", partial(attention_times, topk=topk), scorer[2:])
        yield Case(f"scorer, S {LENGTH}, k {topk}", partial(scorer_times, topk=topk), scorer)


def _draw(bench: Bench, seed: int, *shape: int, dtype=None) -> torch.Tensor:
    """Return random numbers that are the same on every device."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(bench.device, dtype or bench.dtype)


def _qkv(bench: Bench, length: int, size: int, group: int) -> list[torch.Tensor]:
    return [_draw(bench, i, 1, heads, length, size) for i, heads in ((1, 2 * group), (2, 2), (3, 2))]


def attention_right(bench: Bench) -> Iterator[dict]:
    """Check that the retained sets are those of a sort for every query, and outputs, log-sum-exps and gradients."""
    names, options = ("out", "dq", "dk", "dv", "lse"), dict(sinks=3, window=9, topk=11)
    for length, size, group in ((77, 16, 2),) if bench.small else ((300, 64, 3), (300, 128, 4), (513, 80, 1)):
        inputs, priority = _qkv(bench, length, size, group), _draw(bench, 0, 1, 2, length, dtype=torch.float32)
        visible = kept_sets(priority.cpu(), *options.values()).to(bench.device)
        rank, cutoff = ops.running_topk(priority, **options, impl="triton")
        assert torch.equal(visible_keys(rank, cutoff, 3, 9), visible), "retained sets differ"
        order = dict(rank=rank, cutoff=cutoff, sinks=3, window=9)
        kernel = partial(ops.sparse_attention, **order, scale=size**-0.5, impl="triton")
        exact = partial(masked_attention, visible=visible, scale=size**-0.5)
        grad = _draw(bench, 4, *inputs[0].shape)
        yield from _right(bench, kernel, exact, inputs, grad, [f"{name}, D {size}, G {group}" for name in names])


def _right(bench: Bench, kernel, exact, inputs, grad, names: list[str]) -> Iterator[dict]:
    """Check the first result of ``kernel(*inputs)``, its gradients and the second result, as far as they have names.

    ``exact`` is the oracle, in float64 and, for the eager error, in the bench's precision.
    """
    results = []
    for run, dtype in ((kernel, bench.dtype), (exact, torch.float64), (exact, bench.dtype)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out, second = run(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, grad.to(out.dtype)), second)[: len(names)])
    for name, *three in zip(names, *results, strict=True):
        yield from within(bench, *three, name)


def mass_right(bench: Bench) -> Iterator[dict]:
    """Check masses with and without a look-ahead, and those from a part of a row's queries."""
    length, size = (70, 16) if bench.small else (700, 128)
    q, k, _ = _qkv(bench, length, size, 2)
    lse = 3 + _draw(bench, 5, *q.shape[:3], dtype=torch.float32)
    for lookahead, first in ((None, 0), (13, 0), (None, length // 2)):
        options = dict(window=9, scale=size**-0.5, lookahead=lookahead, first=first)
        inputs = q[:, :, first:], k[:, :, : length - first], lse[:, :, first:]
        actual = ops.future_attention_mass(*inputs, **options, impl="triton")
        exact, eager = (
            future_mass(*(x.to(d) for x in inputs), *options.values()) for d in (torch.float64, bench.dtype)
        )
        yield from within(bench, actual, exact, eager, f"mass, look-ahead {lookahead}, queries from {first}")


def mlstm_right(bench: Bench) -> Iterator[dict]:
    """Check outputs and gradients against the chunkwise reference in float64.

    Inputs are first rounded to the low precision.
    """
    length, features, width, delay = (45, 16, 16, 9) if bench.small else (700, 64, 128, 64)
    q, k = (_draw(bench, i, 1, 2, length, features).abs() for i in (1, 2))
    v, igate, fgate = (_draw(bench, i, 1, 2, length, *width_of) for i, width_of in ((5, (width,)), (3, ()), (4, ())))
    inputs, grad = (q, k, v, igate, fgate + 2), _draw(bench, 9, 1, 2, length, width, dtype=torch.float32)

    kernel, exact = (partial(ops.delayed_mlstm, delay=delay, chunk=16, impl=impl) for impl in ("triton", "reference"))
    yield from _right(
        bench, kernel, exact, inputs, grad, [f"mlstm {name}" for name in ("h", "dq", "dk", "dv", "di", "df")]
    )


def attention_times(bench: Bench, topk: int) -> Iterator[dict]:
    """Yield times of forward, and of forward with backward, next to SDPA and FlexAttention.

    The floor of sparse attention is the visible logits at the rate that SDPA reaches on all logits.
    """
    q, k, v = (_draw(bench, i, 1, heads, LENGTH, SIZE) for i, heads in ((1, HEADS), (2, KV_HEADS), (3, KV_HEADS)))
    priority = _draw(bench, 0, 1, KV_HEADS, LENGTH, dtype=torch.float32)
    order = ops.running_topk(priority, sinks=SINKS, window=WINDOW, topk=topk, impl="triton")

    def sparse(*x):
        return ops.sparse_attention(*x, *order, sinks=SINKS, window=WINDOW, scale=SIZE**-0.5, impl="triton")[0]

    runs = {"sparse": sparse, "SDPA": dense, "FlexAttention": compiled_flex(*order, LENGTH, WINDOW)}
    check_same(bench, "sparse_attention", sparse(q, k, v), runs["FlexAttention"](q, k, v))
    leaves, grad = [x.detach().requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    share = visible_share(LENGTH, SINKS + WINDOW + topk)
    for measured, call in (
        ("forward", lambda run: run(q, k, v)),
        ("forward and backward", lambda run: torch.autograd.grad(run(*leaves), leaves, grad)),
    ):
        times = {name: milliseconds(partial(call, run)) for name, run in runs.items()}
        for name, value in times.items():
            yield bench.row(f"{name}, {measured}", value, "ms", times["SDPA"] * share if name == "sparse" else None)


def dense(q, k, v) -> torch.Tensor:
    """Return attention to all tokens, by SDPA."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SIZE**-0.5, enable_gqa=True)


def check_same(bench: Bench, op: str, sparse: torch.Tensor, flex: torch.Tensor) -> None:
    """Check that the outputs of an op are those of FlexAttention."""
    error = float((sparse.float() - flex.float()).abs().max())
    bench.check(error < 0.02, f"{op} and FlexAttention differ by {error:.3g}")


def visible_share(length: int, budget: int) -> float:
    """Return the share of causal logits that are visible when a query sees at most ``budget`` tokens."""
    visible = torch.arange(1, length + 1).clamp_max(budget).double().mean()
    return float(visible / ((length + 1) / 2))


def compiled_flex(rank, cutoff, length: int, window: int):
    """Return FlexAttention compiled for the mask of ``rank`` and ``cutoff`` ``[1, H, S]``.

    Its list of blocks is made beforehand.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    group = HEADS // KV_HEADS

    def visible(batch, head, query, key):
        kv_head = head // group
        retained = (key < SINKS) | (key > query - window) | (rank[batch, kv_head, key] <= cutoff[batch, kv_head, query])
        return retained & (key <= query)

    blocks = create_block_mask(visible, 1, HEADS, length, length, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=blocks, scale=SIZE**-0.5, enable_gqa=True)


def scorer_times(bench: Bench, topk: int) -> Iterator[dict]:
    """Yield times of a layer's scorer: mLSTM forward and backward, order, targets.

    The floor is its tensors read and written once at the bandwidth of a copy.
    """
    q, k = (_draw(bench, i, 1, KV_HEADS, LENGTH, SIZE // 2).abs() for i in (1, 2))
    v, igate, fgate = (
        _draw(bench, i, 1, KV_HEADS, LENGTH, *width_of) for i, width_of in ((5, (SIZE,)), (3, ()), (4, ()))
    )
    inputs = [x.requires_grad_() for x in (q, k, v, igate, fgate)]
    grad = _draw(bench, 9, *v.shape, dtype=torch.float32)
    priority = _draw(bench, 0, 1, KV_HEADS, LENGTH, dtype=torch.float32)
    queries, keys = (_draw(bench, i, 1, heads, LENGTH, SIZE) for i, heads in ((1, HEADS), (2, KV_HEADS)))
    lse = 9 + _draw(bench, 5, 1, HEADS, LENGTH, dtype=torch.float32)

    def scores():
        return ops.delayed_mlstm(*inputs, delay=WINDOW, impl="triton")[0]

    def order():
        ops.running_topk(priority, sinks=SINKS, window=WINDOW, topk=topk, impl="triton")

    def targets():
        ops.future_attention_mass(queries, keys, lse, window=WINDOW, scale=SIZE**-0.5, impl="triton")

    roles, decays = Retention(SINKS + WINDOW + topk, SINKS, WINDOW), torch.zeros(KV_HEADS, device=bench.device)
    begin = min(roles.budget, LENGTH // 2)
    positions = [begin + i * (LENGTH - begin) // Recipe.lists for i in range(Recipe.lists)]

    def lists():
        return listwise_loss(priority, decays, queries, keys, lse, positions, roles, scale=SIZE**-0.5)

    read, written, speed = sum(x.nbytes for x in inputs), grad.nbytes, bandwidth()
    try:
        for precision, products in (("highest", "exact"), ("high", "TF32")):
            torch.set_float32_matmul_precision(precision)
            name = f"delayed_mlstm, {products} products"
            yield bench.row(f"{name}, forward", milliseconds(scores), "ms", (read + written) / speed)
            forward_and_backward = milliseconds(lambda: torch.autograd.grad(scores(), inputs, grad))
            yield bench.row(
                f"{name}, forward and backward", forward_and_backward, "ms", (3 * read + 2 * written) / speed
            )
    finally:
        torch.set_float32_matmul_precision("highest")
    yield bench.row("running_topk", milliseconds(order), "ms", 3 * priority.nbytes / speed)
    yield bench.row("future_attention_mass", milliseconds(targets), "ms")
    yield bench.row("listwise loss, with its gradient", milliseconds(lists), "ms")
