"""Blocks of an engine whose layers form several cache groups, which share one pool of blocks of equal bytes."""

import copy
from collections.abc import Sequence
from dataclasses import replace

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec, MambaSpec

from kvpop_vllm.cache.accounting import common_pages
from kvpop_vllm.config import ConfigError
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

logger = init_logger("vllm.kvpop_vllm")


def with_block_sizes(specs_of_workers: Sequence[dict[str, KVCacheSpec]], vllm_config) -> list[dict[str, KVCacheSpec]]:
    """Return cache specs of layers of several kinds with the slots per block of each.

    vLLM pads the pages of all groups to the largest. That is a page of the policy: N is the least multiple of the block
    size with which it is not smaller than the others. Where states of recurrent layers are cached by prefix, vLLM has
    chosen N: a block holds the state after as many tokens.

    Args:
        specs_of_workers: cache spec of each layer of each worker, by the layer's name.
        vllm_config: config of the engine.

    Raises:
        ConfigError: heads have unequal shares, and the policy's layers form several groups.
    """
    specs = [spec for worker in specs_of_workers for spec in worker.values()]
    ours = next(spec for spec in specs if isinstance(spec, FixedBudgetSpec))
    multiple = ours.block_size if vllm_config.cache_config.user_specified_block_size else 16
    unit = ours.num_kv_heads * ours.state_content_bytes * multiple
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    local = [spec for spec in specs if not isinstance(spec, FixedBudgetSpec | MambaSpec)]
    page, factor = max((spec.page_size_bytes for spec in local), default=0), 1
    if states:
        page = max(page, *(spec.real_page_size_bytes for spec in states))
        slots = max(spec.block_size if spec.mamba_cache_mode == "align" else 0 for spec in states) or multiple * cdiv(
            page, unit
        )
    elif page:
        factor, count = common_pages(page, unit)
        slots = count * multiple
    else:
        slots = ours.block_size

    def sized(spec: KVCacheSpec) -> KVCacheSpec:
        if isinstance(spec, FixedBudgetSpec):
            return replace(spec, block_size=slots)
        if isinstance(spec, MambaSpec):
            return replace(spec, page_size_padded=slots * unit // multiple)
        return replace(spec, block_size=spec.block_size * factor)

    specs_of_workers = [{name: sized(spec) for name, spec in worker.items()} for worker in specs_of_workers]
    if states:
        _say_budget(replace(ours, block_size=slots), vllm_config)
    if ours.shares is not None:
        _check_one_group(vllm_config, {name: spec for worker in specs_of_workers for name, spec in worker.items()})
    return specs_of_workers


def _say_budget(spec: FixedBudgetSpec, vllm_config) -> None:
    """Log how many blocks a request takes in a layer of the policy, and the budget that costs the same."""
    longest = vllm_config.model_config.max_model_len
    blocks, states = spec.blocks(longest), spec.state_blocks
    same_cost = min((blocks - states) * spec.block_size, longest)
    larger = f"; --kv-budget {same_cost} costs the same" if spec.shares is None and same_cost > spec.budget else ""
    state = f", {states} of them for the scorer's state" if states else ""
    logger.info(
        "a block holds the state of a recurrent layer, or %d slots: a request takes %d for %d slots%s%s",
        spec.block_size, blocks, spec.budget, state, larger,
    )  # fmt: skip


def _check_one_group(vllm_config, specs: dict[str, KVCacheSpec]) -> None:
    """Check that the policy's layers form one cache group.

    Raises:
        ConfigError: they form several.
    """
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.kv_cache_layout = KVCacheLayout.LBHNC.name  # which vLLM sets later; our backends take no other
    groups = (group.kv_cache_spec for group in get_kv_cache_groups(config, specs))
    count = sum(isinstance(spec, FixedBudgetSpec) for spec in groups)
    if count > 1:
        raise ConfigError(
            f"the layers with full attention form {count} cache groups, among which heads cannot share slots: set"
            " --kv-allocator uniform, or leave --kv-calibration out"
        )
