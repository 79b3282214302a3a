"""Cartridges of an engine: their blocks in the pool, and their bytes in the workers' caches.

A cartridge is loaded once, into blocks that no request can free. A request that names it begins with these blocks,
as if they were a hit of the prefix cache. A cartridge that stands behind another one needs keys that are turned to
where it stands: such a copy is made when a request asks for it, and lives as long as requests use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvpop_vllm.compaction.cartridge import Cartridge, read_cartridge, turned
from kvpop_vllm.config import ConfigError
from kvpop_vllm.requests import Placed, of_params
from kvpop_vllm.vllm_glue.cache_spec import FixedBudgetManager, FixedBudgetSpec
from kvpop_vllm.vllm_glue.engine_policy import requested
from kvpop_vllm.vllm_glue.patches import wrap


@dataclass
class _Loaded:
    """Blocks of a cartridge, and the names under which it is served."""

    blocks: list[KVCacheBlock]
    rope: dict
    names: set[str] = field(default_factory=set)


@dataclass
class _Copy:
    """Blocks of a cartridge that stands behind others, and the requests that use them."""

    blocks: list[KVCacheBlock]
    users: set[str] = field(default_factory=set)


class CartridgeBlocks:
    """Blocks of the pool that hold cartridges.

    Args:
        pool: block pool of the engine.
        spec: cache spec of the layers.
        longest: ``--max-model-len``.
        run: runs a function of this module in every worker.
    """

    def __init__(self, pool: BlockPool, spec: FixedBudgetSpec, longest: int, run: Callable[[Callable, tuple], Any]):
        self.pool, self.spec, self.longest, self.run = pool, spec, longest, run
        self.loaded: dict[str, _Loaded] = {}
        self.copies: dict[tuple[str, int], _Copy] = {}

    def load(self, name: str, folder: str, placed: Placed) -> None:
        """Load a cartridge under a name.

        Raises:
            ConfigError: the pool has no room for it, or its files have changed.
        """
        if (known := self.loaded.get(placed.digest)) is None:
            blocks = self.pool.get_new_blocks(self._fitting(name, placed.slots))
            try:
                (rope, *_) = self.run(write_cartridge, (folder, placed.digest, [block.block_id for block in blocks]))
            except BaseException:
                self.pool.free_blocks(blocks)
                raise
            known = self.loaded[placed.digest] = _Loaded(blocks, rope)
        known.names.add(name)

    def _fitting(self, name: str, slots: int) -> int:
        """Return the number of blocks of a cartridge.

        Raises:
            ConfigError: beside it and the others, the longest request would not fit, or there is no room now.
        """
        count, size = slots // self.spec.block_size, self.spec.block_size
        all_slots = [slots, *(len(each.blocks) * size for each in self.loaded.values())]
        needed = self.spec.set_aside(all_slots) + self.spec.most_blocks(self.longest)
        if needed >= self.pool.num_gpu_blocks:
            raise ConfigError(
                f"the cartridge {name!r} of {slots} slots leaves no room for a request of --max-model-len {self.longest}: raise"
                " --kv-cache-memory-bytes, or lower --max-model-len"
            )
        if count > self.pool.get_num_free_blocks():
            raise ConfigError(f"requests hold the room for the cartridge {name!r} of {slots} slots: load it later")
        return count

    def unload(self, name: str, digest: str) -> None:
        """Forget a name; the blocks are freed with the last name of a cartridge."""
        known = self.loaded[digest]
        known.names.discard(name)
        if not known.names:
            self.pool.free_blocks(self.loaded.pop(digest).blocks)

    def place(self, request_id: str, cartridges: Sequence[Placed]) -> list[KVCacheBlock] | None:
        """Return the blocks with which a request begins, or None if there is no room for a copy now."""
        blocks, offset = [], 0
        for placed in cartridges:
            if (found := self._at(request_id, placed, offset)) is None:
                self.release(request_id)
                return None
            blocks += found
            offset += placed.slots
        return blocks

    def _at(self, request_id: str, placed: Placed, offset: int) -> list[KVCacheBlock] | None:
        """Return the blocks of a cartridge whose first slot is at a position, made if need be."""
        source = self.loaded[placed.digest]
        if not offset:
            return source.blocks
        key = placed.digest, offset
        if key not in self.copies:
            if len(source.blocks) > self.pool.get_num_free_blocks():
                return None
            blocks = self.pool.get_new_blocks(len(source.blocks))
            numbers = [[block.block_id for block in each] for each in (source.blocks, blocks)]
            self.run(copy_cartridge, (*numbers, offset, source.rope))
            self.copies[key] = _Copy(blocks)
        self.copies[key].users.add(request_id)
        return self.copies[key].blocks

    def release(self, request_id: str) -> None:
        """Forget a request, and free the copies that no other request uses."""
        for key, copy in list(self.copies.items()):
            copy.users.discard(request_id)
            if not copy.users:
                self.pool.free_blocks(self.copies.pop(key).blocks)


# engine


def apply() -> None:
    """Have engines load their cartridges, and give them the methods to load and unload others.

    May be called more than once.
    """
    from vllm.v1.engine.core import EngineCore

    wrap("vllm.v1.engine.core:EngineCore._initialize_effective_attention_block_size", _start)
    EngineCore.kvpop_load_cartridge, EngineCore.kvpop_unload_cartridge = _load, _unload


def _start(original, self) -> None:
    from kvpop_vllm.vllm_glue.cartridge_names import names_of

    original(self)
    longest = self.vllm_config.model_config.max_model_len
    for manager in _managers(self):
        manager.cartridges = CartridgeBlocks(manager.block_pool, manager.kv_cache_spec, longest, _runner(self))
    if requested(self.vllm_config):
        for name, known in names_of(self.vllm_config).known.items():
            self.kvpop_load_cartridge(name, known.folder, *known.placed)


def _managers(engine) -> list:
    """Return the block managers of this package in an engine."""
    all_managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    return [manager for manager in all_managers if isinstance(manager, FixedBudgetManager)]


def _runner(engine) -> Callable[[Callable, tuple], Any]:
    return lambda function, arguments: engine.model_executor.collective_rpc(function, args=arguments)


def _load(self, name: str, folder: str, digest: str, slots: int) -> None:
    """Load a cartridge into an engine under a name; see :meth:`CartridgeBlocks.load`."""
    for manager in _managers(self):
        manager.cartridges.load(name, folder, Placed(digest, slots))


def _unload(self, name: str, digest: str) -> int:
    """Unload a cartridge; return the number of unfinished requests that use it, in which case nothing is done."""
    asked = [of_params(request.sampling_params) for request in self.scheduler.requests.values()]
    using = sum(any(placed.digest == digest for placed in each.cartridges) for each in asked if each is not None)
    for manager in _managers(self):
        if not using or len(manager.cartridges.loaded[digest].names) > 1:
            manager.cartridges.unload(name, digest)
            using = 0
    return using


# workers


def _layers(worker):
    """Yield the attention of each layer of a worker, and the layer's pages by block."""
    from kvpop_vllm.vllm_glue.backend import FixedBudgetImpl

    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if isinstance(impl := getattr(layer, "impl", None), FixedBudgetImpl):
            yield impl, impl._bind(layer.kv_cache)[2]


def write_cartridge(worker, folder: str, digest: str, blocks: list[int]) -> dict:
    """Write a cartridge into blocks of a worker's cache; return the rotary embedding of its keys.

    Keys are turned so that the first token behind the cartridge can have the position of its number of slots.

    Args:
        worker: worker of vLLM.
        folder: folder of the cartridge.
        digest: digest that its files had when it was named.
        blocks: blocks for its slots, in order.

    Raises:
        ConfigError: the files have changed, or do not fit the cache's dtype.
    """
    from kvpop_vllm.vllm_glue.backend import for_config

    cartridge: Cartridge = read_cartridge(folder)
    if cartridge.digest != digest:
        raise ConfigError(f"{folder} has changed while it was loaded: load it again")
    config, heads_of = cartridge.config, for_config(worker.vllm_config).heads
    for impl, pages in _layers(worker):
        k, v, bias = cartridge.layers[impl.layer]
        heads = heads_of(impl.num_kv_heads)
        k = turned(k[heads].float(), config.slots - config.next_position, config.rope)
        bias = torch.zeros(k.shape[:2]) if bias is None else bias[heads]
        _write(pages, blocks, k, v[heads].float(), bias, folder)
    return dict(config.rope)


def copy_cartridge(worker, source: list[int], target: list[int], shift: int, rope: dict) -> None:
    """Copy blocks of a worker's cache, and turn their keys by ``shift`` positions."""
    for _, pages in _layers(worker):
        k, v, bias = (x[source].transpose(0, 1).flatten(1, 2) for x in (pages.k, pages.v, pages.score))
        _write(pages, target, turned(k.float(), shift, rope), v, bias, "a copy")


def _write(pages, blocks: list[int], k, v, bias, what: str) -> None:
    """Write keys and values ``[H, P, D]`` and biases ``[H, P]`` to blocks of one layer."""
    for array, values in ((pages.k, k), (pages.v, v), (pages.score, bias)):
        values = values.to(array.dtype)
        if not bool(values.isfinite().all()):
            raise ConfigError(
                f"{what} has values that {array.dtype} cannot hold: serve with --dtype bfloat16 or float32"
            )
        array[blocks] = values.unflatten(1, (len(blocks), -1)).transpose(0, 1).to(array.device)
