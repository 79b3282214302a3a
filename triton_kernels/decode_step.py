"""Decode step over a fixed-budget paged cache, in a few launches (DESIGN "One step", "In Triton").

The launches depend on shapes alone. Scores and evictions run in one program per request and head
(:mod:`_serving_retain`). Their inputs come from kernels with more programs (:mod:`_serving_scores`).
Attention splits the slots of a head among programs (:mod:`_serving_attend`). Nothing is copied back to the
host.
"""

from __future__ import annotations

import functools

import torch
import triton
from kvpop_vllm.kernels.triton._serving_attend import _attend, _correct, _masses
from kvpop_vllm.kernels.triton._serving_pages import MARKS, Before, Cache, KernelConfig, StepInputs, Weights
from kvpop_vllm.kernels.triton._serving_retain import _evict_and_insert, _products
from kvpop_vllm.kernels.triton._serving_scores import _cells, _project, _residuals
from kvpop_vllm.kernels.triton._tiles import DECODE, tile_of

SPLIT_SLOTS = 128  # minimum number of slots per program of attention
LONGEST_WALK = 8192  # maximum number of protected tokens per program of attention
SEARCHED = 1024  # scores that the search for the lowest one compares at a time
LARGEST_HEAD = 256
PREFIX_LIKE_PAGES = "num_kv_heads", "head_size", "dtype", "block_slots"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def weights_of(scorer, op: str) -> tuple[Weights, dict]:
    """Return a scorer's tensors and its compile-time options.

    Args:
        scorer: scorer of a rule.
        op: name of the calling op, for error messages.

    Raises:
        NotImplementedError: the scorer has no Triton implementation.
        ValueError: unknown feature map.
    """
    if scorer.kernel == "linear":
        return Weights(direct_weight=scorer.weight, out_bias=scorer.bias), {"scorer": "linear"}
    if scorer.kernel == "mlp":
        read, out = (scorer.fc1_weight, scorer.fc1_bias), (scorer.fc2_weight, scorer.fc2_bias)
        of = Weights(read_weight=read[0], read_bias=read[1], out_weight=out[0], out_bias=out[1])
        return of, {"scorer": "mlp", "columns": scorer.fc2_weight.shape[-1]}
    if scorer.kernel == "mlstm":
        options = scorer.options()
        names = set(Weights._fields) & vars(scorer).keys()
        of = Weights(read_weight=scorer.q_proj, direct_weight=scorer.skip_weight)
        return of._replace(**{name: getattr(scorer, name) for name in names}), {
            "scorer": "mlstm",
            "columns": scorer.q_proj.shape[-1],
            "features": scorer.features,
            "values": scorer.value_size,
            "softcap": options["softcap"],
            "delayed": options["delayed"],
            "norm": scorer.norm_weight is not None,
            "skip": scorer.skip_weight is not None,
            "projects_values": scorer.v_proj is not None,
        }
    kinds = {
        "none": {"scorer": "none"},
        "key_norm": {"scorer": "key_norm"},
        "draw": {"scorer": "none", "draws": True},
        "attention_mass": {"scorer": "stored", "masses": True},
        "moment_residual": {"scorer": "stored", "masses": True, "residual": True},
        "gate_scores": {"scorer": "stored", "gate_scores": True},
    }
    if scorer.kernel not in kinds:
        raise NotImplementedError(f"{op} in Triton has no scorer {type(scorer).__name__}: use impl='reference'")
    return Weights(), kinds[scorer.kernel] | scorer.options()


def check_step(q, k, v, pages, rule, weights, prefix, requests: int, op: str) -> None:
    """Check the arguments of a step without reading from the device.

    The arguments not listed here are those of :func:`decode_step`.

    Args:
        requests: number of requests of the step.
        op: name of the calling op, for error messages.

    Raises:
        NotImplementedError, TypeError, ValueError: see :func:`decode_step`.
    """
    if q.dtype not in DTYPES or pages.layout.dtype not in DTYPES:
        raise TypeError(f"{op} in Triton takes float32, float16 and bfloat16, got {q.dtype}, {pages.layout.dtype}")
    if k.dtype != pages.layout.dtype or v.dtype != k.dtype:
        raise TypeError(f"k and v must have the cache's dtype {pages.layout.dtype}, got {k.dtype} and {v.dtype}")
    if (
        k.shape != v.shape
        or k.shape[1] != pages.layout.num_kv_heads
        or q.shape[1] % k.shape[1]
        or not k.shape[-1] == q.shape[-1] == pages.layout.head_size
    ):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit the pages")
    if pages.layout.state_floats < (needed := rule.state_floats(k.shape[-1])):
        raise ValueError(
            f"the layout has room for a state of {pages.layout.state_floats} floats, the rule needs {needed}"
        )
    if prefix is not None:
        alike = all(getattr(prefix.pages.layout, of) == getattr(pages.layout, of) for of in PREFIX_LIKE_PAGES)
        counts = [x for x in (prefix.tokens, prefix.biased) if x is not None]
        if not alike or prefix.table.shape[:-1] != (requests,) or any(x.shape != (requests,) for x in counts):
            raise ValueError(
                f"a prefix of table {tuple(prefix.table.shape)} and numbers {[tuple(x.shape) for x in counts]} does not"
                f" fit {requests} requests and their pages"
            )
    if k.shape[-1] > LARGEST_HEAD:
        raise ValueError(f"{op} in Triton takes heads of up to {LARGEST_HEAD}, got {k.shape[-1]}")
    if rule.window < 1:
        raise ValueError(f"a window holds at least the newest token, got {rule.window}")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("the last axis of q, k and v must be contiguous")
    for name, weight in (*weights._asdict().items(), ("log_gamma", rule.log_gamma)):
        if weight is None:
            continue
        wanted = torch.float64 if name == "log_gamma" else torch.float32
        if weight.dtype != wanted or not weight.is_contiguous() or weight.device != q.device:
            raise ValueError(f"{name} must be contiguous {wanted} on {q.device}, got {weight.dtype} on {weight.device}")


def kernel_config(pages, table, group: int, rule, options: dict, protects: bool) -> KernelConfig:
    """Return the constants that the kernels are compiled for.

    Args:
        pages: the layer's cache.
        table: page table ``[..., P]``.
        group: G.
        rule: retention rule of the layer.
        options: compile-time options of the scorer, from :func:`weights_of`.
        protects: True if there is a prefix.
    """
    layout = pages.layout
    return KernelConfig(
        size=layout.head_size,
        padded=max(16, triton.next_power_of_2(layout.head_size)),
        group=group,
        slots=layout.block_slots,
        state_pages=layout.state_blocks,
        region_words=layout.region_bytes // 4,
        most_slots=(table.shape[-1] - layout.state_blocks) * layout.block_slots,
        sinks=rule.sinks,
        decay_step=rule.decay_step,
        uses_moment_correction=rule.moment_correction,
        protects=protects,
        **options,
    )


@functools.cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or 4 if kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _splits(config: KernelConfig, protected: int, programs: int, block: int, device: torch.device) -> int:
    """Return the number of parts into which a head's slots and ``protected`` tokens are split.

    There are enough parts for two programs per multiprocessor. The number depends on shapes alone.
    """
    wanted = max(triton.cdiv(2 * _processors(device), max(1, programs)), triton.cdiv(protected, LONGEST_WALK))
    return max(1, min(wanted, (protected + config.most_slots) // max(block, SPLIT_SLOTS), 64))


def decode_step(
    q, k, v, pages, page_table, positions, budgets, *, rule, scale, gate_scores=None, prefix=None, keys=None, windows
):
    """Implement :func:`kvpop_vllm.kernels.ops.decode_step`.

    The function never waits for the device, so a CUDA graph can capture it. Launches and allocations (by
    ``torch.empty``) depend on shapes and the rule's constants alone. It adds these rules to the schema:

    - A step that does not start at a head's ``tokens_seen`` raises no error. The head's pages stay unchanged;
      its outputs and log-sum-exps are NaN.
    - A position of -1 is padding. No page is read or written for it, whatever its page-table row and
      ``budgets`` are. Its outputs are 0 and its log-sum-exps -inf.
    - ``scale`` and the numbers of the rule are on the host. All tensors, including those of the rule and the
      prefix, are on q's device.

    Raises:
        NotImplementedError: the scorer has no Triton implementation.
        TypeError: a dtype other than float32, float16 and bfloat16, or k and v in another dtype than the
            cache.
        ValueError: shapes that do not fit, a last axis that is not contiguous, or tensors of the rule on
            another device.
    """
    weights, options = weights_of(rule.scorer, "decode_step")
    check_step(q, k, v, pages, rule, weights, prefix, len(q), "decode_step")
    config = kernel_config(pages, page_table, q.shape[1] // k.shape[1], rule, options, prefix is not None)
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), _floats(q.device, *q.shape[:2])
    if len(q):
        told = positions, budgets, windows, gate_scores, prefix, keys
        take_step(config, q, k, v, pages, page_table, told, rule, weights, scale, out, lse)
    return out, lse


def cache_of(pages, table) -> Cache:
    """Return the pages of a layer and their table ``[R, H, P]`` as kernels take them."""
    arrays = pages.k, pages.v, pages.score, pages.position, pages.state
    return Cache(*arrays, *pages.k.stride()[:2], *pages.score.stride()[:2], table, *table.stride())


def before_of(prefix) -> Before:
    """Return the pages of a prefix, or of none, as kernels take them."""
    if prefix is None:
        return Before()
    k, v, bias, biased = prefix.pages.k, prefix.pages.v, prefix.pages.score, prefix.biased
    before = Before(k, v, *k.stride()[:2], prefix.table, *prefix.table.stride())
    if biased is None:
        return before
    words, words_head = bias.stride()[:2]
    return before._replace(
        bias=bias, words=words, words_head=words_head, biased=biased, biased_request=biased.stride(0)
    )


def take_step(config, q, k, v, pages, page_table, told, rule, weights, scale, out, lse) -> None:
    """Launch the kernels of a step that has been checked.

    The arguments not listed here are those of :func:`decode_step`.

    Args:
        config: compile-time constants.
        told: positions, budgets, windows, gate scores, prefix and keys, as :func:`decode_step` takes them.
        weights: tensors of the scorer.
        out: ``[R, Hq, D]``, contiguous; written.
        lse: ``[R, Hq]`` float32, contiguous; written.
    """
    (requests, heads, size), device = k.shape, q.device
    positions, budgets, windows, gate_scores, prefix, keys = told
    cache = cache_of(pages, page_table)
    asked = StepInputs(
        k, v, *k.stride()[:2], *v.stride()[:2], positions, positions.stride(0),
        budgets, *budgets.stride(), gate_scores, *((0, 0) if gate_scores is None else gate_scores.stride()),
        *((None, 0) if prefix is None else (prefix.tokens, prefix.tokens.stride(0))),
        windows, windows.stride(0),
        keys, *((0, 0) if keys is None else keys.stride()),
    )  # fmt: skip
    step_flags = torch.empty(requests, heads, MARKS.value, dtype=torch.int32, device=device)
    work = _score(config, cache, asked, weights, requests, heads, scale, step_flags)
    _evict_and_insert[heads, requests](
        cache, asked, weights, rule.log_gamma, *work, step_flags, heads, P=config,
        BLOCK=min(SEARCHED, triton.next_power_of_2(config.most_slots)), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if config.moments:
        rows = triton.cdiv(size, 32)
        _products[rows, heads, requests](cache, work[3], step_flags, heads, P=config, BLOCK_X=32, num_warps=4)
    _attention(config, q, cache, before_of(prefix), out, lse, step_flags, requests, heads, scale)


def _floats(device, *shape) -> torch.Tensor:
    """Return an uninitialised float32 tensor."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def _score(config, cache, asked, weights, requests, heads, scale, step_flags):
    """Compute the inputs of :func:`_evict_and_insert` and return its workspaces.

    They are products with weights, numerators, residuals, and deviations of the evicted tokens.
    """
    device = step_flags.device
    projected = numerators = factors = evicted_deltas = step_flags  # unused workspaces need any valid pointer
    if config.scorer in ("mlp", "mlstm"):
        projected = _floats(device, requests, heads, config.projected)
        tiles, blocks = triton.cdiv(requests, 16), triton.cdiv(config.columns, 64)
        if config.scorer == "mlstm":
            blocks = 2 * blocks + (triton.cdiv(config.values, 64) if config.projects_values else 0) + 1
        _project[tiles, blocks, heads](
            cache, asked, weights, projected, requests, heads, P=config, ROWS=16, BLOCK_C=64, BLOCK_X=32, num_warps=4
        )
    if config.scorer == "mlstm":
        numerators = _floats(device, requests, heads, config.values)
        _cells[triton.cdiv(config.values, 32), heads, requests](
            cache, asked, projected, numerators, heads, P=config, BLOCK_V=32, num_warps=4
        )
    if config.residual:
        factors = _floats(device, requests, heads, config.most_slots)
        _residuals[triton.cdiv(config.most_slots, 32), heads, requests](
            cache, asked, factors, heads, scale, P=config, BLOCK_S=32, BLOCK_X=32, num_warps=4
        )
    if config.moments:
        evicted_deltas = _floats(device, requests, heads, 2, config.size)
    return projected, numerators, factors, evicted_deltas


def _attention(config, q, cache, before, out, lse, step_flags, requests, heads, scale) -> None:
    """Write outputs and log-sum-exps, and attention masses if the rule needs them."""
    device, query_heads = q.device, q.shape[1]
    wide = q.dtype != cache.k.dtype or q.dtype == torch.float32
    tile = tile_of(DECODE, wide, config.size)
    block = max(16, min(tile.keys, config.slots & -config.slots))  # a power of two that divides N
    protected = before.table.shape[1] * config.slots if config.protects else 0
    splits = _splits(config, protected, requests * heads, block, device)
    group = triton.next_power_of_2(config.group)
    merged = _floats(device, *out.shape) if config.uses_moment_correction else out
    sums = tops = logits = lse
    if splits > 1:
        sums = _floats(device, requests, query_heads, splits, config.size)
        tops = _floats(device, requests, query_heads, splits, 2)
    if config.masses:
        logits = _floats(device, requests, query_heads, config.most_slots)
    _attend[splits, heads, requests](
        q, cache, before, merged, lse, sums, tops, logits, step_flags, heads, splits, scale, *q.stride()[:2],
        P=config, GROUP=max(tile.rows, group), CUT=splits > 1, BLOCK_S=block, WIDE=wide, BIASED=before.bias is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    columns = triton.cdiv(config.padded, 64)
    if config.uses_moment_correction:
        _correct[columns, heads, requests](
            q, cache, merged, lse, out, step_flags, heads, scale, *q.stride()[:2],
            P=config, GROUP=max(16, group), BLOCK_C=64, BLOCK_X=32, num_warps=4,
        )  # fmt: skip
    if config.masses:
        _masses[triton.cdiv(config.most_slots, 128), heads, requests](
            logits, lse, cache, step_flags, heads, P=config, GROUP=group, BLOCK_S=128, num_warps=4
        )
