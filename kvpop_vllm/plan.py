"""``kvpop plan``: bytes of a request and number of requests that fit, for every policy and budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from kvpop_vllm import policies
from kvpop_vllm.argument_types import UNITS
from kvpop_vllm.cache.accounting import (
    CacheBytes,
    common_pages,
    compressing_bytes,
    dense_request_bytes,
    request_bytes,
    window_bytes,
    worst_prompts,
)
from kvpop_vllm.cache.pages import BLOCK_SLOTS, PageLayout
from kvpop_vllm.cache.ranks import Shard, layers_of_stages, shards_of
from kvpop_vllm.calibration.shares import check_holds_any, has_shares
from kvpop_vllm.calibration.statistics import CONFIG_NAME
from kvpop_vllm.config import ConfigError, PolicySettings, protected_tokens
from kvpop_vllm.model_shape import (
    ModelShape,
    positions_of,
    read_model_config,
    rope_of,
    shape_of,
    text_config,
)
from kvpop_vllm.policies.base import Policy
from kvpop_vllm.scorers import build, make_config, parse_config
from kvpop_vllm.scorers.checkpoint import check_model, read_scorer
from kvpop_vllm.scorers.published_checkpoint import is_published
from kvpop_vllm.supported import CHUNKED, DTYPES, FULL, HEAD_SIZES, SLIDING, refused_beside, sliding_window, unserved

SHARES = (2, 4, 8)
"""Divisors of the longest request's tokens that give the default budgets."""
SINKS, LARGEST_WINDOW = 4, 256
"""Sinks and largest window of an untrained scorer, for learned policies without a scorer.

The window is at most a quarter of the budget.
"""


def plan(options) -> None:
    """Run ``kvpop plan`` and print its table.

    Raises:
        ConfigError: the model's config, the scorer, a budget or another option cannot work.
    """
    config = read_model_config(options.model)
    text, sizes = text_config(config), shape_of(config, Path(options.model) / "config.json", options.max_model_len)
    length = options.max_model_len or positions_of(config)
    if length is None:
        raise ConfigError(f"{options.model}: config.json has no max_position_embeddings: give --max-model-len")
    shape = ModelShape(**sizes, max_model_len=length, rope=rope_of(config))
    _check_served(options.model, shape, config)
    if shape.num_kv_heads % options.tensor_parallel_size and options.tensor_parallel_size % shape.num_kv_heads:
        raise ConfigError(
            f"--tensor-parallel-size {options.tensor_parallel_size} does not divide {shape.num_kv_heads} KV heads, nor they it: choose another"
        )
    if options.pipeline_parallel_size > shape.model_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {options.pipeline_parallel_size} is more than {shape.model_layers} layers: lower it"
        )
    heads = max(1, shape.num_kv_heads // options.tensor_parallel_size)
    stages = shape.stages(layers_of_stages(shape.model_layers, options.pipeline_parallel_size))
    shards, layers = shards_of(stages, shape.num_kv_heads, options.tensor_parallel_size), max(b - a for a, b in stages)
    dtype = _dtype(options, config)
    budgets = options.budget or sorted({-(-length // share) for share in SHARES}, reverse=True)
    source = f"{options.model}: config.json, section kvpop"
    section = getattr(text, "kvpop", None)
    own = parse_config(section, source) if section is not None else None
    given = None
    if options.scorer is None and is_published(options.model):
        options.scorer = options.model
    if options.scorer:
        config = read_scorer(options.scorer)[0]
        check_model(config, **sizes, source=options.scorer)
        given = config.scorer
    if options.prompt_length is not None and options.prompt_length > length:
        raise ConfigError(
            f"--prompt-length {options.prompt_length} is more than the request's {length} tokens: lower it"
        )
    classes, notes = policies.loadable()
    if options.calibration is not None:
        check_holds_any(options.calibration, CONFIG_NAME)
    else:
        notes += [
            f"{cls.name} needs statistics of the model's queries: give --calibration DIR"
            for cls in classes
            if cls.calibrated
        ]
        classes = [cls for cls in classes if not cls.calibrated]
    rows, unused = [], []
    per_block, stock_layers = options.block_size or BLOCK_SLOTS, None
    stock = dense_request_bytes(layers, heads, shape.head_dim, dtype, shape.max_model_len, options.dense_block_size)
    if shape.kinds:
        stock_layers = StockLayers.of(text, shape, options, heads, dtype)
        per_block, dense_layers = stock_layers.slots, StockLayers.of(text, shape, options, heads, dtype, policy=False)
        stock = dense_layers.added_to(stock, layers, 0)
        notes.insert(0, stock_layers.note(shape))
    rows.append(_row("dense, stock vLLM", shape.max_model_len, stock, options.kv_memory, stock))
    for budget in budgets:
        for cls in classes:
            if cls.keeps_all:
                continue
            try:
                policy = _policy(cls, budget, shape, options, given, own)
                policy.check_ranks(options.tensor_parallel_size)
                if reason := refused_beside(shape.kinds, gate=policy.gated):
                    raise ConfigError(reason)
            except ConfigError as error:
                notes.append(f"{cls.name}, {budget} tokens: {str(error).replace('--kv-', '--')}")
                continue
            layout = PageLayout(heads, shape.head_dim, dtype, per_block, policy.state_floats)
            held, waste = _bytes_of_rank(layout, layers, policy, shards, options.prompt_length)
            unused += [] if waste is None else [waste]
            page = heads * layout.region_bytes
            request = held if stock_layers is None else stock_layers.added_to(held, layers, page)
            rows.append(_row(cls.name, budget, request, options.kv_memory, stock))
    if len(rows) == 1:
        raise ConfigError(notes[-1])
    parallel = f" a rank of {options.tensor_parallel_size}" if options.tensor_parallel_size > 1 else ""
    staged = f" a stage of {options.pipeline_parallel_size}" if options.pipeline_parallel_size > 1 else ""
    if unused:
        percent = sorted(
            {f"{100 * share:.0f}%" for share in (min(unused), max(unused))}, key=lambda text: int(text[:-1])
        )
        notes.append(
            f"unequal shares: a request holds as many blocks in every rank, {' to '.join(percent)} of them unused; 'kvpop calibrate"
            " --tensor-parallel-size' and '--pipeline-parallel-size' balance ranks"
        )
    print(
        f"{layers} layers{_of_kinds(shape)}{staged}, {heads} KV heads of {shape.head_dim}{parallel}, {str(dtype).removeprefix('torch.')}; requests of "
        f"{shape.max_model_len} tokens, {_size(options.kv_memory)} of KV memory, {per_block} slots a block"
    )
    print(_table(rows))
    if compressing := [cls.name for cls in classes if cls.compresses]:
        notes.append(
            f"{', '.join(compressing)} hold the whole prompt while it is prefilled: what they hold is that of a prompt's end"
        )
    if given != "mlstm" and (own is None or own.scorer != "mlstm"):
        notes.insert(0, "kvpop's state is that of a scorer of default size: give --scorer DIR for another")
    print("\n".join(notes), end="\n" if notes else "")


@dataclass(frozen=True)
class StockLayers:
    """Layers of a model that a policy does not act on, in a rank.

    Attributes:
        per_layer: what a request holds in each of them.
        page: bytes of their page, by which stock vLLM's blocks are counted.
        slots: N, slots of a policy's block, whose page is at least as large.
    """

    per_layer: list[CacheBytes]
    page: int
    slots: int

    @classmethod
    def of(
        cls, text: Any, shape: ModelShape, options, heads: int, dtype: torch.dtype, policy: bool = True
    ) -> StockLayers:
        """Return the other layers of the pipeline stage with the most of them, next to a policy or in stock vLLM."""
        block, multiple = options.dense_block_size, options.block_size or 16
        if policy and options.block_size:
            block = options.block_size
        page, factor, count = 2 * heads * shape.head_dim * dtype.itemsize * block, 1, 1
        if policy:
            factor, count = common_pages(page, PageLayout(heads, shape.head_dim, dtype, multiple).region_bytes * heads)
        tokens = {SLIDING: sliding_window(text), CHUNKED: getattr(text, "attention_chunk_size", None)}
        bounds = layers_of_stages(shape.model_layers, options.pipeline_parallel_size)
        kinds = max(([kind for kind in shape.kinds[slice(*stage)] if kind != FULL] for stage in bounds), key=len)
        sizes = heads, shape.head_dim, dtype
        per_layer = [window_bytes(*sizes, tokens[kind], shape.max_model_len, factor * block) for kind in kinds]
        return cls(per_layer, page * factor, count * multiple)

    def added_to(self, request: CacheBytes, layers: int, page: int) -> CacheBytes:
        """Return what a request holds in all layers, in pages of equal size.

        Args:
            request: what it holds in the layers that a policy acts on.
            layers: number of these layers.
            page: bytes of a page of the policy, 0 for stock vLLM.
        """
        pages = request.blocks * layers + sum(layer.blocks for layer in self.per_layer)
        canonical = request.canonical + sum(layer.canonical for layer in self.per_layer)
        return CacheBytes(canonical, pages * max(page, self.page), pages)

    def note(self, shape: ModelShape) -> str:
        """Return the line that says what is counted."""
        kinds = " and ".join(sorted({*shape.kinds} - {FULL}))
        size = _size(sum(layer.allocated for layer in self.per_layer))
        return (
            f"in every row are the {len(self.per_layer)} layers of {kinds}, in which a request holds {size} at its end"
        )


def _of_kinds(shape: ModelShape) -> str:
    """Return what a plan's layers are, where a policy acts on some layers of a model only."""
    return f" with full attention of {shape.model_layers}" if shape.kinds else ""


def _bytes_of_rank(
    layout: PageLayout, layers: int, policy: Policy, shards: Sequence[Shard], prompt: int | None
) -> tuple[CacheBytes, float | None]:
    """Return the most bytes that a request of the longest length holds in a rank, and the part of them that is unused.

    With unequal shares a request holds as many blocks in every rank: those of the rank that needs most.

    Args:
        layout: page layout of the layers.
        layers: layers of the stage with the most.
        policy: resolved policy.
        shards: layers and heads of each rank.
        prompt: tokens of the prompt, or None for the length that takes the most blocks.

    Returns:
        The bytes, and the part of all ranks' blocks that they need not; None if all need as many, or there is one rank.
    """
    length, retention, division = policy.model.max_model_len, policy.retention, policy.division(shards)
    if division is None:
        return _most_bytes((layout, layers, length), policy, None, prompt), None
    by_rank = [
        _most_bytes((layout, shares.layers, length), policy, shares, prompt)
        for shares in division.shares(retention.budget, retention.window)
    ]
    sizes, blocks = [shard.layers[1] - shard.layers[0] for shard in shards], max(rank.blocks for rank in by_rank)
    needed = sum(rank.blocks * size for rank, size in zip(by_rank, sizes, strict=True))
    per_block = layers * layout.num_kv_heads * layout.region_bytes
    largest = CacheBytes(max(rank.canonical for rank in by_rank), blocks * per_block, blocks)
    return largest, 1 - needed / (blocks * sum(sizes)) if len(shards) > 1 else None


def _most_bytes(lengths: tuple, policy: Policy, shares, prompt: int | None) -> CacheBytes:
    """Return the most bytes that a request holds: at its end or, if prompts are compressed, at the prompt's.

    Args:
        lengths: layout, number of layers, tokens of the request.
        policy: resolved policy.
        shares: budgets of all heads, or None if they are equal.
        prompt: tokens of the prompt, or None for the length that takes the most blocks.
    """
    length, retention = lengths[2], policy.retention
    if policy.compresses:
        prompt = length if prompt is None else prompt
        kept = retention, policy.compression, shares
        at_its_end = compressing_bytes(*lengths[:2], prompt, *kept)
        at_the_end = request_bytes(*lengths, retention, shares, prompt, policy.compression)
        return max(at_its_end, at_the_end, key=lambda held: held.blocks)
    longest = protected_tokens(policy.protect, length)
    if prompt is not None or not longest:
        own = protected_tokens(policy.protect, prompt or 0)
        return request_bytes(*lengths, retention, shares, own)
    prompts = worst_prompts(longest, length, lengths[0].block_slots)
    return max((request_bytes(*lengths, retention, shares, own) for own in prompts), key=lambda held: held.blocks)


def _check_served(folder: str, shape: ModelShape, config: Any) -> None:
    """Check that a resolved config does not describe a model that no policy serves.

    Raises:
        ConfigError: it does.
    """
    text = text_config(config)
    features = {
        "MLA": getattr(text, "kv_lora_rank", None) is not None,
        "encoder-decoder": getattr(config, "is_encoder_decoder", False),
        "sliding-window": getattr(config, "rswa_window", None),
    }
    reasons = [] if shape.head_dim in HEAD_SIZES else [f"head size {shape.head_dim}"]
    reasons += unserved(text, features, shape.max_model_len, mixed=True)
    if reasons:
        raise ConfigError(f"{folder} has {', '.join(reasons)}, which no policy serves: choose another model")


def _policy(cls: type[Policy], budget: int, shape: ModelShape, options, given: str | None, own) -> Policy:
    """Return the policy with its scorer.

    The scorer is the one of ``--scorer`` if its kind ``given`` fits, else the checkpoint's ``own``, else an
    untrained one. The last two have shapes only.
    """
    mine = options.scorer if given is not None and given == cls.scorer_kind else None
    settings = PolicySettings(
        cls.name,
        budget,
        scorer=mine,
        calibration=options.calibration if cls.calibrated or has_shares(options.calibration) else None,
        correction=options.correction,
        allocator=options.allocator,
        protect_prompt=options.protect_prompt,
    )
    if cls.scorer_kind is None or mine:
        return cls(settings, shape)
    window = max(1, min(LARGEST_WINDOW, budget // 4))
    config = (
        own
        if own is not None and own.scorer == cls.scorer_kind
        else make_config(
            vars(shape),
            cls.scorer_kind,
            source="kvpop plan",
            sinks=SINKS,
            window=window,
            topk=max(0, budget - SINKS - window),
        )
    )
    policy = cls(settings, shape, checkpoint=config)
    with torch.device("meta"):
        policy.set_tensors(0, dict(build(config).state_dict()))
    return policy


def _dtype(options, config: Any) -> torch.dtype:
    if options.dtype:
        return getattr(torch, options.dtype)
    dtype = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    named = dtype and str(dtype).removeprefix("torch.")
    if named in DTYPES["cpu"]:
        return getattr(torch, named)
    why = " is in float16, which no policy serves" if named == "float16" else f": config.json names the dtype {named!r}"
    raise ConfigError(f"{options.model}{why}: give --dtype {' or '.join(DTYPES['cpu'])}")


def _row(name: str, budget: int, held: CacheBytes, pool: int, stock: CacheBytes) -> tuple[str, ...]:
    def fit(one: CacheBytes) -> Fraction:  # as vLLM counts: whole blocks of the pool over blocks of a request
        return Fraction(pool // (one.allocated // one.blocks), one.blocks)

    more = f"{float(fit(held) / fit(stock)):.2f}" if fit(stock) else "-"
    return name, str(budget), _size(held.canonical), _size(held.allocated), f"{float(fit(held)):.1f}", more


def _table(rows: list[tuple[str, ...]]) -> str:
    rows = [("policy", "tokens", "canonical", "allocated", "requests", "x dense"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        row[0].ljust(widths[0]) + "".join(f"  {cell.rjust(w)}" for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def _size(count: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if count >= UNITS[unit[:-1]]:
            return f"{count / UNITS[unit[:-1]]:.1f} {unit}"
    return f"{count} B"
