"""``kvpop plan``: bytes of a request and number of requests that fit, for every policy and budget.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kvpop_vllm import policies
from kvpop_vllm.argument_types import UNITS
from kvpop_vllm.cache.accounting import CacheBytes, compressing_bytes, request_bytes, worst_prompts
from kvpop_vllm.cache.layer_groups import BlockSizes, Pool, StockLayers
from kvpop_vllm.cache.pages import BLOCK_SLOTS, PageLayout, cdiv
from kvpop_vllm.cache.ranks import Shard, layers_of_stages, shards_of
from kvpop_vllm.calibration.shares import check_holds_any, has_shares
from kvpop_vllm.calibration.statistics import CONFIG_NAME
from kvpop_vllm.config import ConfigError, PolicySettings, protected_tokens
from kvpop_vllm.model_shape import (
    ModelShape,
    attention_sizes,
    positions_of,
    read_model_config,
    rope_of,
    shape_of,
    text_config,
)
from kvpop_vllm.policies.base import Policy
from kvpop_vllm.recurrent_states import state_bytes
from kvpop_vllm.scorers import build, make_config, parse_config
from kvpop_vllm.scorers.checkpoint import check_model, read_scorer
from kvpop_vllm.scorers.published_checkpoint import is_published
from kvpop_vllm.supported import (
    CHUNKED,
    DTYPES,
    HEAD_SIZES,
    HYBRID,
    RECURRENT,
    SLIDING,
    recurrence,
    recurrent_layers,
    sliding_window,
    unserved,
)

SHARES = (2, 4, 8)
"""Divisors of the longest request's tokens that give the default budgets."""
SINKS, LARGEST_WINDOW = 4, 256
"""Sinks and largest window of an untrained scorer, for learned policies without a scorer.

The window is at most a quarter of the budget.
"""


def plan(options) -> None:
    """Run ``kvpop plan`` and print its table."""
    result, memory = compute(options), options.kv_memory
    rows = [_row("dense, stock vLLM", result.model.length, result.stock, memory, result.stock)]
    rows += [_row(*key, request, memory, result.stock) for key, request in result.requests.items()]
    print(result.model.headline(result.pool))
    print(_table(rows))
    print("\n".join(result.notes), end="\n" if result.notes else "")


@dataclass(frozen=True)
class Result:
    """Numbers of a plan: what requests of a model hold.

    Attributes:
        model: the model.
        pool: pool of an engine with a policy.
        stock: what a request holds in stock vLLM.
        requests: what it holds with each policy and budget.
        notes: lines that say what is counted, and which policies have no row.
    """

    model: Planned
    pool: Pool
    stock: CacheBytes
    requests: dict[tuple[str, int], CacheBytes]
    notes: list[str]


def compute(options) -> Result:
    """Return what requests hold, from options of ``kvpop plan``."""
    model = Planned.of(options)
    scorer = _scorer_kind(options, model)
    classes, notes = _classes(options)
    pool, requests, pools, unused, refusals = model.pool(), {}, {}, [], []
    # default budgets are rounded up
    for budget in options.budget or sorted({-(-model.length // share) for share in SHARES}, reverse=True):
        # a policy that cannot use a budget gets a note, and the others their rows
        for cls in classes:
            try:
                policy = _policy(cls, budget, model, options, scorer)
                _check_drafts(policy, options.drafts)
                used = pools[cls.name, budget] = replace(pool, states=2 if _caches_prefixes(policy, model) else 1)
                requests[cls.name, budget], waste = _bytes_of_rank(used, model, policy, options.prompt_length)
            except ConfigError as error:
                refusals.append(f"{cls.name}, {budget} tokens: {str(error).replace('--kv-', '--')}")
                continue
            unused += [] if waste is None else [waste]
    if not requests:
        # the first: that of the last policy may be about its statistics alone
        raise ConfigError(refusals[0])
    large = _large_blocks(pools, requests, model.length) if pool.has_states else []
    notes = [*_before(model, pool, scorer), *notes, *refusals, *large, *_after(classes, unused)]
    return Result(model, pool, model.stock_request(), requests, notes)


@dataclass(frozen=True)
class Planned:
    """A model, a length of requests, and how an engine lays both out.

    Attributes:
        options: options of ``kvpop plan``.
        config: the model's config, resolved by transformers.
        shape: shape of the layers that a policy acts on.
        dtype: dtype of the cache.
        heads: KV heads of a rank.
        bounds: layers of each pipeline stage, as the model counts them.
    """

    options: Any
    config: Any
    shape: ModelShape
    dtype: torch.dtype
    heads: int
    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, options) -> Planned:
        """Return what options of ``kvpop plan`` describe."""
        config = read_model_config(options.model)
        sizes = shape_of(config, Path(options.model) / "config.json", options.max_model_len)
        length = options.max_model_len or positions_of(config)
        if length is None:
            raise ConfigError(f"{options.model}: config.json has no max_position_embeddings: give --max-model-len")
        if options.prompt_length is not None and options.prompt_length > length:
            raise ConfigError(
                f"--prompt-length {options.prompt_length} is more than the request's {length} tokens: lower it"
            )
        shape = ModelShape(**sizes, max_model_len=length, rope=rope_of(config, length))
        _check_served(options.model, shape, config)
        ranks, stages = options.tensor_parallel_size, options.pipeline_parallel_size
        if shape.num_kv_heads % ranks and ranks % shape.num_kv_heads:
            raise ConfigError(
                f"--tensor-parallel-size {ranks} does not divide {shape.num_kv_heads} KV heads, nor they it: choose another"
            )
        if stages > shape.model_layers:
            raise ConfigError(f"--pipeline-parallel-size {stages} is more than {shape.model_layers} layers: lower it")
        heads, dtype = max(1, shape.num_kv_heads // ranks), _dtype(options, config)
        bounds = tuple(layers_of_stages(shape.model_layers, stages))
        return cls(options, config, shape, dtype, heads, bounds)

    @cached_property
    def stock(self) -> tuple[StockLayers, ...]:
        """The layers that a policy does not act on, by kind."""
        return other_layers(text_config(self.config), self.shape, self.dtype, self.options)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token in a layer that the policy acts on, on one rank."""
        return 2 * self.heads * self.shape.head_dim * self.dtype.itemsize

    @property
    def length(self) -> int:
        """Tokens of a request."""
        return self.shape.max_model_len

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Layers and heads of each rank, as the policy counts them."""
        stages = self.shape.stages(self.bounds)
        return shards_of(stages, self.shape.num_kv_heads, self.options.tensor_parallel_size)

    def stock_request(self) -> CacheBytes:
        """Return what a request holds in stock vLLM, at its end."""
        block, token = self.options.dense_block_size, self.token_bytes
        pool = self._pool(BlockSizes.of_stock(token, block, self.stock))
        pool = replace(pool, states=2 if self.options.enable_prefix_caching else 1)
        return pool.request(pool.full_layers * self.length * token, cdiv(self.length, pool.sizes.slots), self.length)

    def pool(self) -> Pool:
        """Return the pool of an engine with any policy."""
        default = 16 if self.stock else BLOCK_SLOTS
        stock_size = self.options.block_size or self.options.dense_block_size
        unit = self.layout(BLOCK_SLOTS).slot_bytes * self.heads
        return self._pool(BlockSizes.of(unit, self.options.block_size or default, self.stock, stock_size))

    def layout(self, slots: int, policy: Policy | None = None) -> PageLayout:
        """Return the page layout of a layer that the policy acts on, with ``slots`` per block."""
        sizes = self.heads, self.shape.head_dim, self.dtype, slots
        if policy is None:
            return PageLayout(*sizes)
        drafts = self.options.drafts
        # queries are staged with drafts alone
        return PageLayout(*sizes, policy.state_floats, drafts, policy.draft_query_bytes(self.dtype) if drafts else 0)

    def _pool(self, sizes: BlockSizes) -> Pool:
        layers = self.shape.layers or range(self.shape.model_layers)
        return Pool.of(layers, self.stock, self.bounds, sizes)

    def headline(self, pool: Pool) -> str:
        """Return the first line of the output."""
        ranks, stages = self.options.tensor_parallel_size, self.options.pipeline_parallel_size
        parallel = f" a rank of {ranks}" if ranks > 1 else ""
        staged = f" a stage of {stages}" if stages > 1 else ""
        kinds = f" with full attention of {self.shape.model_layers}" if self.shape.kinds else ""
        return (
            f"{pool.full_layers} layers{kinds}{staged}, {self.heads} KV heads of {self.shape.head_dim}{parallel},"
            f" {str(self.dtype).removeprefix('torch.')}; requests of {self.length} tokens, {size_text(self.options.kv_memory)} of KV memory,"
            f" {pool.sizes.slots} slots a block"
        )


def other_layers(text: Any, shape: ModelShape, dtype: torch.dtype, options: Any) -> tuple[StockLayers, ...]:
    """Return the layers of a model that a policy does not act on and that keep something of a request, by kind.

    Args:
        text: the model's text config.
        shape: the model's shape.
        dtype: dtype of the cache.
        options: options of ``kvpop plan``.
    """
    ranks = options.tensor_parallel_size
    windows = {SLIDING: sliding_window(text), CHUNKED: getattr(text, "attention_chunk_size", None)}
    by_kind = {kind: tuple(i for i, name in enumerate(shape.kinds) if name == kind) for kind in windows}
    stock = []
    for kind, tokens in windows.items():
        if layers := by_kind[kind]:
            heads, size = attention_sizes(text, layers)
            token_bytes = 2 * max(1, heads // ranks) * size * dtype.itemsize
            stock.append(StockLayers(kind, layers, token_bytes, tokens, kind == CHUNKED))
    # the state of a recurrent layer has a dtype of its own
    named = options.mamba_ssm_cache_dtype and getattr(torch, options.mamba_ssm_cache_dtype)
    if recurrent := recurrent_layers(text, shape.model_layers):
        stock.append(StockLayers("recurrent state", recurrent, state_bytes=state_bytes(text, dtype, ranks, named)))
    return tuple(stock)


def _check_drafts(policy: Policy, drafts: int) -> None:
    """Check that an engine takes the drafts of ``--drafts``."""
    recurrent = {RECURRENT, HYBRID} & {*policy.model.kinds}
    reason = "its model has recurrent layers" if recurrent else policy.no_drafts
    if drafts and reason:
        raise ConfigError(f"no speculative decoding, since {reason}")


def _scorer_kind(options, model: Planned) -> ScorerKinds:
    """Return the kinds of the scorers that are at hand, and read the one of ``--scorer``."""
    source, section = f"{options.model}: config.json, section kvpop", getattr(text_config(model.config), "kvpop", None)
    of_model = parse_config(section, source) if section is not None else None
    folder = options.scorer or (options.model if is_published(options.model) else None)
    if not folder:
        return ScorerKinds(of_model)
    config = read_scorer(folder)[0]
    names = "model_type", "num_layers", "num_kv_heads", "head_dim", "hidden_size", "layers"
    sizes = {name: size for name in names if (size := getattr(model.shape, name)) is not None}
    check_model(config, **sizes, source=folder)
    return ScorerKinds(of_model, folder, config.scorer)


@dataclass(frozen=True)
class ScorerKinds:
    """Scorers that policies of a plan may take.

    Attributes:
        of_model: config of the scorer that is part of the model's checkpoint, or None.
        folder: folder of the scorer of ``--scorer``, or None.
        kind: its kind.
    """

    of_model: Any = None
    folder: str | None = None
    kind: str | None = None


def _classes(options) -> tuple[list[type[Policy]], list[str]]:
    """Return the policies that have rows, and notes on those that have none."""
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
    return [cls for cls in classes if not cls.keeps_all], notes


def _before(model: Planned, pool: Pool, scorer: ScorerKinds) -> list[str]:
    """Return the notes on what all rows count."""
    notes, length = [], model.length
    if scorer.kind != "mlstm" and (scorer.of_model is None or scorer.of_model.scorer != "mlstm"):
        notes.append("kvpop's state is that of a scorer of default size: give --scorer DIR for another")
    for kind, groups, layers in pool.stock:
        size = size_text(groups * pool.blocks_of(kind, length) * pool.block_bytes)
        twice = (
            ", and as much again where prefixes are cached" if kind.state_bytes and length > pool.sizes.slots else ""
        )
        notes.append(
            f"in every row are the {layers} layers of {kind.kind}, in which a request holds {size} at its end{twice}"
        )
    groups = pool.groups + sum(groups for _, groups, _ in pool.stock)
    if padding := groups * pool.pages - pool.full_layers - sum(layers for *_, layers in pool.stock):
        notes.append(f"vLLM forms {groups} cache groups of {pool.pages} layers, {padding} of which are padding")
    return notes


def _large_blocks(
    pools: Mapping[tuple[str, int], Pool], requests: Mapping[tuple[str, int], CacheBytes], length: int
) -> list[str]:
    """Return the lines that say what blocks as large as a recurrent state cost.

    Args:
        pools: pool of an engine with each policy and budget.
        requests: what requests hold with each policy and budget.
        length: tokens of a request.
    """
    lines, alike = [], {}
    for (name, budget), request in requests.items():
        # policies that hold the same share a line
        alike.setdefault((budget, request, pools[name, budget]), []).append(name)
    for (budget, request, pool), names in alike.items():
        slots, stock = pool.sizes.slots, pool.stock_blocks(length)
        equal = cdiv(budget, slots) * slots
        same = f"; {equal} tokens cost the same" if equal != budget else ""
        lines.append(
            f"{', '.join(names)}, {budget} tokens: blocks are as large as a recurrent state ({slots} slots,"
            f" {size_text(pool.block_bytes)}); a request holds {request.blocks - stock} for slots and {stock} for other layers,"
            f" {100 * (1 - request.canonical / request.allocated):.0f}% of them unused{same}"
        )
    return lines


def _after(classes: Sequence[type[Policy]], unused: Sequence[float]) -> list[str]:
    """Return the notes on unequal shares and on policies that compress prompts."""
    notes = []
    if unused:
        percent = sorted(
            {f"{100 * share:.0f}%" for share in (min(unused), max(unused))}, key=lambda text: int(text[:-1])
        )
        notes.append(
            f"unequal shares: a request holds as many blocks in every rank, {' to '.join(percent)} of them unused; 'kvpop calibrate"
            " --tensor-parallel-size' and '--pipeline-parallel-size' balance ranks"
        )
    if compressing := [cls.name for cls in classes if cls.compresses]:
        notes.append(
            f"{', '.join(compressing)} hold the whole prompt while it is prefilled: what they hold is that of a prompt's end"
        )
    return notes


def _bytes_of_rank(pool: Pool, model: Planned, policy: Policy, prompt: int | None) -> tuple[CacheBytes, float | None]:
    """Return the most bytes that a request holds in a rank, and the part of its blocks that is unused.

    With unequal shares a request holds as many blocks in every rank: those of the rank that needs most.

    Args:
        pool: pool of the engine with the policy.
        model: the model.
        policy: resolved policy.
        prompt: tokens of the prompt, or None for the length that takes the most blocks.

    Returns:
        The bytes, and the part of all ranks' blocks that they need not, None if all need as many, or there is one rank.
    """
    layout, shards, retention = model.layout(pool.sizes.slots, policy), model.shards, policy.retention
    division = policy.division(shards)
    if division is None:
        layers = _most_bytes((layout, pool.full_layers, model.length), policy, None, prompt)
        return pool.request(layers.canonical, layers.blocks, model.length), None
    # regions of unequal heads lie in the allocation of one group, which every stage must have
    sizes = [shard.layers[1] - shard.layers[0] for shard in shards]
    if pool.groups > 1 or not all(sizes):
        reason = f"form {pool.groups} cache groups" if all(sizes) else "are missing in a stage"
        raise ConfigError(f"the layers with full attention {reason}, so heads cannot have unequal shares")
    by_rank = [
        _most_bytes((layout, shares.layers, model.length), policy, shares, prompt)
        for shares in division.shares(retention.budget, retention.window)
    ]
    # vLLM allocates as many blocks on every rank
    blocks = max(rank.blocks for rank in by_rank)
    # weighted by layers, since a block has a page in each
    needed = sum(rank.blocks * size for rank, size in zip(by_rank, sizes, strict=True))
    largest = pool.request(max(rank.canonical for rank in by_rank), blocks, model.length)
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
        retained_by = retention, policy.compression, shares
        at_its_end = compressing_bytes(*lengths[:2], prompt, *retained_by)
        at_the_end = request_bytes(*lengths, retention, shares, prompt, policy.compression)
        return max(at_its_end, at_the_end, key=lambda size: size.blocks)
    longest = protected_tokens(policy.protect, length)
    if prompt is not None or not longest:
        return request_bytes(*lengths, retention, shares, protected_tokens(policy.protect, prompt or 0))
    prompts = worst_prompts(min(length, longest), length, lengths[0].block_slots)  # a request may ask for less
    return max(
        (request_bytes(*lengths, retention, shares, prompt_tokens) for prompt_tokens in prompts),
        key=lambda size: size.blocks,
    )


def _check_served(folder: str, shape: ModelShape, config: Any) -> None:
    """Check that a resolved config does not describe a model that no policy serves."""
    text = text_config(config)
    features = {
        "MLA": getattr(text, "kv_lora_rank", None) is not None,
        "encoder-decoder": getattr(config, "is_encoder_decoder", False),
        "sliding-window": getattr(config, "rswa_window", None),
    }
    # an engine serves the recurrent layers of these families
    if recurrence(text) is not None:
        features["recurrent"] = False
    reasons = [] if shape.head_dim in HEAD_SIZES else [f"head size {shape.head_dim}"]
    reasons += unserved(text, features, shape.max_model_len)
    if reasons:
        raise ConfigError(f"{folder} has {', '.join(reasons)}, which no policy serves: choose another model")


def _policy(cls: type[Policy], budget: int, model: Planned, options, scorer: ScorerKinds) -> Policy:
    """Return a policy with its scorer.

    That is the one of ``--scorer`` if its kind fits, else the checkpoint's, else an untrained one. The last two have
    shapes only.
    """
    folder = scorer.folder if scorer.kind is not None and scorer.kind == cls.scorer_kind else None
    settings = PolicySettings(
        cls.name,
        budget,
        scorer=folder,
        # a folder of shares is for every policy, and statistics are for those that need them
        calibration=options.calibration if cls.calibrated or has_shares(options.calibration) else None,
        correction=options.correction,
        allocator=options.allocator,
        protect_prompt=options.protect_prompt,
    )
    if cls.scorer_kind is None or folder:
        policy = cls(settings, model.shape)
    else:
        policy = _with_scorer_of_shapes(cls, settings, model.shape, scorer)
    policy.check_ranks(options.tensor_parallel_size)
    return policy


def _with_scorer_of_shapes(
    cls: type[Policy], settings: PolicySettings, shape: ModelShape, scorer: ScorerKinds
) -> Policy:
    """Return a policy with the checkpoint's scorer, or an untrained one of default size, without values."""
    config = scorer.of_model
    if config is None or config.scorer != cls.scorer_kind:
        window = max(1, min(LARGEST_WINDOW, settings.budget // 4))
        roles = {"sinks": SINKS, "window": window, "topk": max(0, settings.budget - SINKS - window)}
        config = make_config(vars(shape), cls.scorer_kind, source="kvpop plan", **roles)
    policy = cls(settings, shape, checkpoint=config)
    # only shapes count here
    with torch.device("meta"):
        policy.set_tensors(0, dict(build(config).state_dict()))
    return policy


def _caches_prefixes(policy: Policy, model: Planned) -> bool:
    """Return whether an engine with a policy caches prefixes: as the options say, else where it protects prompts."""
    if (chosen := model.options.enable_prefix_caching) is not None:
        return chosen
    # a policy that compresses holds its prompt in the prefix
    return policy.compresses or protected_tokens(policy.protect, model.length) > 0


def _dtype(options, config: Any) -> torch.dtype:
    if options.dtype:
        return getattr(torch, options.dtype)
    dtype = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    named = dtype and str(dtype).removeprefix("torch.")
    if named in DTYPES["cpu"]:
        return getattr(torch, named)
    end = " is in float16, which no policy serves" if named == "float16" else f": config.json names the dtype {named!r}"
    raise ConfigError(f"{options.model}{end}: give --dtype {' or '.join(DTYPES['cpu'])}")


def _row(name: str, budget: int, policy_bytes: CacheBytes, pool: int, stock: CacheBytes) -> tuple[str, ...]:
    def fit(size: CacheBytes) -> Fraction:  # as vLLM counts: whole blocks of the pool over blocks of a request
        return Fraction(pool // (size.allocated // size.blocks), size.blocks)

    ratio = f"{float(fit(policy_bytes) / fit(stock)):.2f}" if fit(stock) else "-"
    return (
        name,
        str(budget),
        size_text(policy_bytes.canonical),
        size_text(policy_bytes.allocated),
        f"{float(fit(policy_bytes)):.1f}",
        ratio,
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    rows = [("policy", "tokens", "canonical", "allocated", "requests", "x dense"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        row[0].ljust(widths[0]) + "".join(f"  {cell.rjust(w)}" for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def size_text(count: int) -> str:
    """Return a number of bytes in the largest unit of which it has one."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= UNITS[unit[:-1]]:
            return f"{count / UNITS[unit[:-1]]:.1f} {unit}"
    return f"{count} B"
