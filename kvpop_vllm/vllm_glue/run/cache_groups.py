"""Blocks of an engine whose layers form several cache groups, which share one pool of blocks of equal bytes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace

from vllm.v1.engine.core import get_kv_cache_configs
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec

from kvpop_vllm.cache.accounting import common_pages
from kvpop_vllm.config import ConfigError
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec


def with_block_sizes(specs_of_workers: Sequence[dict[str, KVCacheSpec]], vllm_config) -> list[dict[str, KVCacheSpec]]:
    """Return cache specs of layers of several kinds with the slots per block of each.

    vLLM pads the pages of all groups to the largest. That is a page of the policy: N is the least multiple of the block
    size with which it is not smaller than the others.

    Args:
        specs_of_workers: cache spec of each layer of each worker, by the layer's name.
        vllm_config: config of the engine.

    Raises:
        ConfigError: heads have unequal shares, and the policy's layers form several groups.
    """
    cache = vllm_config.cache_config
    multiple = cache.block_size if cache.user_specified_block_size else 16
    specs = [spec for worker in specs_of_workers for spec in worker.values()]
    ours = next(spec for spec in specs if isinstance(spec, FixedBudgetSpec))
    page = max((spec.page_size_bytes for spec in specs if not isinstance(spec, FixedBudgetSpec)), default=0)
    factor, slots = common_pages(page, ours.num_kv_heads * ours.state_content_bytes * multiple)

    def sized(spec: KVCacheSpec) -> KVCacheSpec:
        if isinstance(spec, FixedBudgetSpec):
            return replace(spec, block_size=slots * multiple)
        return replace(spec, block_size=spec.block_size * factor)

    if page:
        specs_of_workers = [{name: sized(spec) for name, spec in worker.items()} for worker in specs_of_workers]
    if ours.shares is not None:
        _check_one_group(vllm_config, {name: spec for worker in specs_of_workers for name, spec in worker.items()})
    return list(specs_of_workers)


def _check_one_group(vllm_config, specs: dict[str, KVCacheSpec]) -> None:
    """Check that the policy's layers form one cache group.

    Raises:
        ConfigError: they form several.
    """
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.kv_cache_layout = KVCacheLayout.LBHNC.name  # which vLLM sets later; our backends take no other
    planning = sys.modules[get_kv_cache_configs.__module__]  # its place differs between versions
    groups = (group.kv_cache_spec for group in planning.get_kv_cache_groups(config, specs))
    count = sum(isinstance(spec, FixedBudgetSpec) for spec in groups)
    if count > 1:
        raise ConfigError(
            f"the layers with full attention form {count} cache groups, among which heads cannot share slots: set"
            " --kv-allocator uniform, or leave --kv-calibration out"
        )
