"""Cartridges of an engine: their blocks in the pool, and their bytes in the workers' caches.

A cartridge is loaded once, into blocks that no request can free. A request that names it begins with these blocks,
as if they were a hit of the prefix cache. A cartridge after another one needs keys that are turned to
its positions. Such a copy is made when a request asks for it, and lives as long as requests use it.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvpop_vllm.compaction.cartridge import layer_at, read_cartridge, read_config, rope_at, turned
from kvpop_vllm.config import ConfigError
from kvpop_vllm.requests import Placed, of_params
from kvpop_vllm.vllm_glue.extras.cartridge_names import names_of
from kvpop_vllm.vllm_glue.extras.reports import manager_of
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec


@dataclass
class _Loaded:
    """Blocks of a cartridge, and the names under which it is served."""

    blocks: list[KVCacheBlock]
    rope: dict
    names: set[str] = field(default_factory=set)


@dataclass
class _Copy:
    """Blocks of a cartridge that stands after others, and the requests that use them."""

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
        """Load a cartridge under a name."""
        if (loaded := self.loaded.get(placed.digest)) is None:
            blocks = self.pool.get_new_blocks(self._fitting(name, placed.slots))
            try:
                self._run(write_slots, folder, placed.digest, [block.block_id for block in blocks])
            except BaseException:
                self.pool.free_blocks(blocks)
                raise
            loaded = self.loaded[placed.digest] = _Loaded(blocks, read_config(folder).rope)
        loaded.names.add(name)

    def _run(self, function: Callable, *arguments) -> None:
        """Run a function in every worker. It returns its error, because replies after an exception stay unread."""
        if errors := [error for error in self.run(function, arguments) if error is not None]:
            raise ConfigError(errors[0])

    def _fitting(self, name: str, slots: int) -> int:
        """Return the number of blocks of a cartridge."""
        count, size = slots // self.spec.block_size, self.spec.block_size
        all_slots = [slots, *(len(loaded.blocks) * size for loaded in self.loaded.values())]
        # a pool without room for the longest request would wait for ever
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
        """Forget a name. The blocks are freed with the last name of a cartridge."""
        loaded = self.loaded[digest]
        loaded.names.discard(name)
        if not loaded.names:
            self.pool.free_blocks(self.loaded.pop(digest).blocks)

    @contextmanager
    def unpinned(self) -> Iterator[None]:
        """Let go of the cartridges' blocks for a while in which nothing is allocated. Requests keep theirs."""
        blocks = [block for loaded in self.loaded.values() for block in loaded.blocks]
        self.pool.free_blocks(blocks)
        try:
            yield
        finally:
            self.pool.touch(blocks)

    def place(self, request_id: str, cartridges: Sequence[Placed]) -> list[KVCacheBlock] | None:
        """Return the blocks with which a request begins, or None if there is no room for a copy now."""
        offsets = itertools.accumulate((placed.slots for placed in cartridges), initial=0)
        keys = [(placed.digest, offset) for placed, offset in zip(cartridges, offsets, strict=False)]
        missing = [key for key in keys[1:] if key not in self.copies]
        if sum(len(self.loaded[digest].blocks) for digest, _ in missing) > self.pool.get_num_free_blocks():
            return None
        blocks = list(self.loaded[keys[0][0]].blocks)
        for key in keys[1:]:
            blocks += self._copied(request_id, *key)
        return blocks

    def _copied(self, request_id: str, digest: str, offset: int) -> list[KVCacheBlock]:
        """Return the blocks of a cartridge whose first slot is at position ``offset``, made if need be."""
        source, key = self.loaded[digest], (digest, offset)
        # requests share the copy of a cartridge at the same position
        if key not in self.copies:
            blocks = self.pool.get_new_blocks(len(source.blocks))
            numbers = [[block.block_id for block in run] for run in (source.blocks, blocks)]
            self._run(copy_slots, *numbers, offset, source.rope)
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


def load_first(original, self, *args, **kwargs) -> None:
    """Wrap a step of an engine's start: load the cartridges with which it starts."""
    original(self, *args, **kwargs)
    if (manager := manager_of(self.scheduler)) is None:
        return
    sizes = manager.block_pool, manager.kv_cache_spec, self.vllm_config.model_config.max_model_len
    run = self.model_executor.collective_rpc
    manager.cartridges = CartridgeBlocks(*sizes, lambda function, arguments: run(function, args=arguments))
    for name, cartridge in names_of(self.vllm_config).served.items():
        self.kvpop_load_cartridge(name, cartridge.folder, *cartridge.placed)


def preprocess_add_request(original, self, request, *args, **kwargs):
    """Wrap the intake of a request: refuse cartridges that the engine does not have."""
    slots, manager = of_params(request.sampling_params), manager_of(self.scheduler)
    for placed in () if slots is None or manager is None else slots.cartridges:
        if placed.digest not in manager.cartridges.loaded:
            raise ConfigError("the cartridge is not loaded any more: name another")
    return original(self, request, *args, **kwargs)


def reset_prefix_cache(original, self, *args, **kwargs) -> bool:
    """Wrap the reset of the prefix cache: no request's blocks are those of cartridges meanwhile."""
    if (manager := manager_of(self)) is None or manager.cartridges is None:
        return original(self, *args, **kwargs)
    # a request that waits may have copies already, and makes them again
    for name in manager.placed - set(manager.req_to_blocks):
        manager.forget_cartridges(name)
    with manager.cartridges.unpinned():
        return original(self, *args, **kwargs)


def load(self, name: str, folder: str, digest: str, slots: int) -> None:
    """Load a cartridge into an engine under a name. See :meth:`CartridgeBlocks.load`."""
    manager_of(self.scheduler).cartridges.load(name, folder, Placed(digest, slots))


def unload(self, name: str, digest: str) -> int:
    """Unload a cartridge. Return the number of unfinished requests that use it, in which case nothing is done."""
    cartridges = manager_of(self.scheduler).cartridges
    slots_of_requests = [of_params(request.sampling_params) for request in self.scheduler.requests.values()]
    using = sum(
        any(placed.digest == digest for placed in slots.cartridges) for slots in slots_of_requests if slots is not None
    )
    if using and len(cartridges.loaded[digest].names) == 1:
        return using
    cartridges.unload(name, digest)
    return 0


# workers

PIECE = 64
"""Blocks that are turned at a time, which bounds the memory."""


def layers_of(worker):
    """Yield the attention of each layer of a worker, and its pages as :meth:`FixedBudgetImpl._bind` returns them."""
    from kvpop_vllm.vllm_glue.run.backend import FixedBudgetImpl

    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if isinstance(impl := getattr(layer, "impl", None), FixedBudgetImpl):
            yield impl, *impl._bind(layer.kv_cache)


def _reported(function: Callable) -> Callable:
    """Return the function with its error's text as result, None without one."""

    @functools.wraps(function)
    def reported(*arguments) -> str | None:
        try:
            function(*arguments)
        except Exception as error:
            return str(error) or type(error).__name__
        return None

    return reported


@_reported
def write_slots(worker, folder: str, digest: str, blocks: list[int]) -> None:
    """Write a cartridge into blocks of a worker's cache, turned so that tokens can go on after its slots.

    Args:
        worker: worker of vLLM.
        folder: folder of the cartridge.
        digest: digest that its files had when it was named.
        blocks: blocks for its slots, in order.
    """
    from kvpop_vllm.vllm_glue.run.backend import for_config

    cartridge, heads_of = read_cartridge(folder), for_config(worker.vllm_config).heads
    if cartridge.digest != digest:
        raise ConfigError(f"{folder} has changed while it was loaded: load it again")
    for impl, _, _, pages in layers_of(worker):
        heads = heads_of(impl.num_kv_heads)
        head_parts = tuple(None if part is None else part[heads] for part in cartridge.layers[impl.layer])
        _write(pages, blocks, *layer_at(cartridge.config, impl.layer, head_parts, 0), folder)


@_reported
def copy_slots(worker, source: list[int], target: list[int], shift: int, rope: dict) -> None:
    """Copy blocks of a worker's cache, and turn their keys by ``shift`` positions."""
    for impl, _, _, pages in layers_of(worker):
        layer_rope = rope_at(rope, impl.layer)
        for first in range(0, len(source), PIECE):
            part = slice(first, first + PIECE)
            k, v, bias = (x[source[part]].transpose(0, 1).flatten(1, 2) for x in (pages.k, pages.v, pages.score))
            _write(pages, target[part], turned(k.float(), shift, layer_rope), v, bias, "a copy")


def _write(pages, blocks: list[int], k, v, bias, source: str) -> None:
    """Write keys and values ``[H, P, D]`` and biases ``[H, P]`` to blocks of one layer."""
    for array, values in ((pages.k, k), (pages.v, v), (pages.score, bias)):
        values = values.to(array.dtype)
        if not bool(values.isfinite().all()):
            raise ConfigError(
                f"{source} has values that {array.dtype} cannot hold: serve with --dtype bfloat16 or float32"
            )
        array[blocks] = values.unflatten(1, (len(blocks), -1)).transpose(0, 1).to(array.device)
