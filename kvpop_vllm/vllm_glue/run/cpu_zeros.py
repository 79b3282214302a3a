"""Blocks of layers that a policy does not act on, zeroed on a CPU before they are used."""

from vllm.v1.kv_cache_interface import AttentionSpec

from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec


def zero_block_ids(original, self, block_ids: list[int]) -> None:
    """Wrap the zeroing of a step's new blocks, which passes over windows and chunks.

    Blocks of all layers lie in one pool, and vLLM's attention multiplies slots that it does not use by 0. Scores,
    positions and states of a policy, read as keys and values, may be infinite or NaN. Recurrent layers do not read a
    state before it is written.
    """
    original(self, block_ids)
    layers = self.compilation_config.static_forward_context
    specs = ((group, group.kv_cache_spec) for group in self.kv_cache_config.kv_cache_groups)
    groups = (
        group for group, spec in specs if isinstance(spec, AttentionSpec) and not isinstance(spec, FixedBudgetSpec)
    )
    caches = (layers[name].kv_cache for group in groups for name in group.layer_names)
    for cache in {cache.data_ptr(): cache for cache in caches}.values():  # layers of several groups share bytes
        cache[block_ids] = 0
