"""Decode step over a fixed-budget paged cache, in a few launches (DESIGN "One step"; docs/kernels.md)."""

from __future__ import annotations

import functools

import torch
import triton
from kvpop_vllm.kernels.triton._constants import check_size
from kvpop_vllm.kernels.triton._serving_attend import MASSES, _attend, _correct, _masses
from kvpop_vllm.kernels.triton._serving_pages import MARKS, Cache, KernelConfig, Step, Weights, view
from kvpop_vllm.kernels.triton._serving_retain import _evict_and_insert, _products
from kvpop_vllm.kernels.triton._serving_scores import CELLS, COLUMNS, DEPTH, ROWS, SLOTS, _cells, _project, _residuals
from kvpop_vllm.kernels.triton._tiles import DECODE, LARGE, tile_of

from kvpop_vllm.kernels.dispatch import TRITON_DTYPES

SPLIT_SLOTS = 128  # minimum number of slots per program of attention
LONGEST_WALK = 8192  # maximum number of protected tokens per program of attention
SEARCHED = 1024  # scores that the search for the lowest one compares at a time
PREFIX_LIKE_PAGES = "num_kv_heads", "head_size", "dtype", "block_slots"
KINDS = dict.fromkeys(("none", "key_norm", "linear", "mlp", "mlstm"), {}) | {
    "draw": {"scorer": "none", "draws": True},
    "attention_mass": {"scorer": "stored", "masses": True},
    "moment_residual": {"scorer": "stored", "masses": True, "residual": True},
    "gate_scores": {"scorer": "stored", "gate_scores": True},
}
"""Compile-time options of each kind of scorer, apart from its own."""


def weights_of(scorer, op: str) -> tuple[Weights, dict]:
    """Return a scorer's tensors and compile-time options; raise NotImplementedError if kernels have no such kind."""
    if scorer.kernel not in KINDS:
        raise NotImplementedError(f"{op} in Triton has no scorer {type(scorer).__name__}: use impl='reference'")
    options = {"scorer": scorer.kernel} | KINDS[scorer.kernel] | scorer.options()
    if scorer.kernel == "mlp":
        options["columns"] = scorer.fc2_weight.shape[-1]
    if scorer.kernel == "mlstm":
        del options["hedgehog"]  # features say it
        options |= {"columns": scorer.q_proj.shape[-1], "features": scorer.features, "values": scorer.value_size}
    matrices = (getattr(scorer, name, None) for name in ("fc1_weight", "q_proj", "k_proj", "v_proj"))
    options["parts"] = sum(triton.cdiv(matrix.shape[-1], COLUMNS.value) for matrix in matrices if matrix is not None)
    return Weights(**{name: tensor for name, tensor in vars(scorer).items() if name in Weights._fields}), options


def check_step(q, k, v, pages, rule, weights, prefix, requests: int, window: int, op: str) -> None:
    """Check the arguments of a step, whose smallest window is ``window``, without reading from the device.

    Errors are those of :func:`decode_step`, and name the calling op.
    """
    layout = pages.layout
    if not {q.dtype, layout.dtype} <= set(TRITON_DTYPES[op]):
        raise TypeError(f"{op} in Triton takes float32, float16 and bfloat16, got {q.dtype}, {layout.dtype}")
    if k.dtype != layout.dtype or v.dtype != k.dtype:
        raise TypeError(f"k and v must have the cache's dtype {layout.dtype}, got {k.dtype} and {v.dtype}")
    fits = k.shape == v.shape and k.shape[1:] == (layout.num_kv_heads, layout.head_size)
    if not fits or q.shape[-1] != layout.head_size or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit the pages")
    if layout.state_floats < (needed := rule.state_floats(k.shape[-1])):
        raise ValueError(f"the layout has room for a state of {layout.state_floats} floats, the rule needs {needed}")
    if prefix is not None:
        alike = all(getattr(prefix.pages.layout, field) == getattr(layout, field) for field in PREFIX_LIKE_PAGES)
        counts = [x for x in (prefix.tokens, prefix.biased) if x is not None]
        if not alike or prefix.table.shape[:-1] != (requests,) or any(x.shape != (requests,) for x in counts):
            raise ValueError(
                f"a prefix of table {tuple(prefix.table.shape)} and numbers {[tuple(x.shape) for x in counts]} does not"
                f" fit {requests} requests and their pages"
            )
    check_size(op, k.shape[-1])
    if window < 1:
        raise ValueError(f"a window holds at least the newest token, got {window}")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("the last axis of q, k and v must be contiguous")
    for name, weight in (*weights._asdict().items(), ("log_gamma", rule.log_gamma)):
        if weight is None:
            continue
        dtype = torch.float64 if name == "log_gamma" else torch.float32
        if weight.dtype != dtype or not weight.is_contiguous() or weight.device != q.device:
            raise ValueError(f"{name} must be contiguous {dtype} on {q.device}, got {weight.dtype} on {weight.device}")


def kernel_config(pages, table, q, rule, options: dict) -> KernelConfig:
    """Return the constants that the kernels are compiled for, with the scorer's ``options`` from :func:`weights_of`."""
    layout, group = pages.layout, q.shape[-2] // pages.layout.num_kv_heads
    wide = q.dtype != layout.dtype or q.dtype == torch.float32
    tile = tile_of(DECODE, wide, layout.head_size)
    most_slots = (table.shape[-1] - layout.state_blocks) * layout.block_slots
    stores = rule.compression or rule.rounds
    if stores is not None and stores.queries:
        first = rule.first_query(layout.head_size)
        options = options | {"queries": stores.queries, "query_word": first, "of_prompt": rule.compresses}
    return KernelConfig(
        size=layout.head_size, group=group, slots=layout.block_slots, most_slots=most_slots, wide=wide,
        state_pages=layout.state_blocks, region_words=layout.region_bytes // 4,
        rows=max(tile.rows, triton.next_power_of_2(group)),
        block=max(16, min(tile.keys, layout.block_slots & -layout.block_slots)),  # a power of two that divides N
        searched=min(SEARCHED, triton.next_power_of_2(most_slots)),
        dependent=_dependent(q.device),
        sinks=rule.sinks, decay_step=rule.decay_step, uses_moment_correction=rule.moment_correction, **options,
    )  # fmt: skip


@functools.cache
def _dependent(device: torch.device) -> bool:
    """Return True on a GPU whose launches can begin before the one before ends: of compute capability 9 or more."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or 4 if kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def splits_of(config: KernelConfig, protected: int, programs: int, device: torch.device) -> tuple[int, tuple]:
    """Return the most parts into which a head's slots and ``protected`` tokens are split, and what they follow from.

    There are enough parts for two programs per multiprocessor. The most depends on shapes alone. How many a head has
    is known on the device (:func:`_serving_attend.parts_of`, which takes the other numbers).
    """
    target, smallest = triton.cdiv(2 * _processors(device), max(1, programs)), max(config.block, SPLIT_SLOTS)
    parts = min(max(target, triton.cdiv(protected, LONGEST_WALK)), (protected + config.most_slots) // smallest, 64)
    return max(1, parts), (target, smallest, LONGEST_WALK)


def decode_step(
    q, k, v, pages, page_table, positions, budgets, *, rule, scale, gate_scores=None, prefix=None, keys=None, windows,
    sink_logits=None, out=None,
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.decode_step`. A token below p is written to its prefix page.

    The function never waits for the device, so a CUDA graph can capture it. Launches and allocations (by
    ``torch.empty``) depend on shapes and the rule's constants alone. All tensors are on q's device. A step that does
    not start at a head's ``tokens_seen`` leaves its pages unchanged and makes its outputs and log-sum-exps NaN. A
    position of -1 is padding, whatever its page-table row and ``budgets`` are: outputs are 0 and log-sum-exps -inf.

    Raises:
        NotImplementedError: the scorer has no Triton implementation. TypeError: a dtype other than float32, float16 and
        bfloat16, or k and v in another dtype than the cache. ValueError: shapes that do not fit, a last axis that is
        not contiguous, or tensors of the rule on another device.
    """
    weights, options = weights_of(rule.scorer, "decode_step")
    requests, heads = len(q), k.shape[1]
    check_step(q, k, v, pages, rule, weights, prefix, requests, rule.window, "decode_step")
    config = kernel_config(pages, page_table, q, rule, options)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = floats(q.device, *q.shape[:2])
    if not requests:
        return out, lse
    of_prefix = (None, None) if prefix is None else (prefix.tokens, prefix.biased)
    views = map(view, (q, k, v, gate_scores, positions, budgets, windows, keys, *of_prefix))
    work = floats(q.device, requests, heads, config.work)
    flags = torch.empty(requests, heads, MARKS.value, dtype=torch.int32, device=q.device)
    cache, before = cache_of(pages, page_table), prefix_of(prefix)
    step = Step(*views, cache, before, weights, rule.log_gamma, scale, out, lse, work, flags, sink_logits)
    of_all = {"P": config, "launch_pdl": config.dependent}
    launch = of_all | {"num_warps": 8 if config.size > LARGE else 4}
    if config.parts:
        _project[triton.cdiv(requests, ROWS.value), config.parts, heads](step, requests, **launch)
    if config.scorer == "mlstm":
        _cells[triton.cdiv(config.values, CELLS.value) + 1, heads, requests](step, **launch, enable_fp_fusion=False)
    if config.residual:
        _residuals[triton.cdiv(config.most_slots, SLOTS.value), heads, requests](step, **launch)
    _evict_and_insert[1, heads, requests](step, **launch, enable_fp_fusion=False)
    if config.moments:
        _products[triton.cdiv(config.size, DEPTH.value), heads, requests](step, **launch)
    tile = tile_of(DECODE, config.wide, config.size)
    protected = 0 if prefix is None else before.table.shape[1] * config.slots
    splits, numbers = splits_of(config, protected, requests * heads, q.device)
    sums = tops = lse
    if splits > 1:
        sums, tops = floats(q.device, *lse.shape, splits, config.size), floats(q.device, *lse.shape, splits, 2)
    _attend[splits, heads, requests](
        step, sums, tops, *numbers, CUT=splits > 1, num_warps=tile.warps, num_stages=tile.stages, **of_all
    )
    if config.uses_moment_correction:
        _correct[triton.cdiv(config.size, COLUMNS.value), heads, requests](step, **launch)
    if config.masses:
        _masses[triton.cdiv(config.most_slots, MASSES.value), heads, requests](step, **launch)
    return out, lse


def cache_of(pages, table) -> Cache:
    """Return the pages of a layer and their table ``[R, H, P]`` as kernels take them."""
    return Cache(*pages.arrays, table, *table.stride())


def prefix_of(prefix) -> Cache:
    """Return the pages of a prefix and their table as kernels take them."""
    if prefix is None:
        return Cache()
    pages, (row, page) = prefix.pages, prefix.table.stride()
    arrays = pages.k, pages.v, None if prefix.biased is None else pages.score, None, None
    return Cache(*arrays, *pages.k.stride()[:2], *pages.score.stride()[:2], prefix.table, row, 0, page)


def floats(device, *shape) -> torch.Tensor:
    """Return an uninitialised float32 tensor."""
    return torch.empty(*shape, dtype=torch.float32, device=device)  # sizes as a tuple take twice as long
