"""Recorder of an engine in this process: held tokens after every layer call, and blocks at every step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from engine.judge import Held

from kvpop_vllm.cache.divided_heads import load_page_table
from kvpop_vllm.config import protected_tokens
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.rules.retained import held_after_prompt, held_tokens
from kvpop_vllm.vllm_glue.run.backend import FixedBudgetImpl
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy, requested


class Blocks(NamedTuple):
    """Blocks after one call of the scheduler.

    Attributes:
        running: request -> (tokens scheduled so far, tokens that it may come to, its p, B and w if there is a policy,
            its blocks).
        free: number of free blocks.
    """

    running: dict[str, tuple[int, int, tuple[int, int, int] | None, list[int]]]
    free: int


@dataclass
class Recorder:
    """Recorder of an engine's requests while it is attached.

    Attributes:
        retained: request -> layer -> one :class:`Held` per step, in order.
        tensors: (request, layer, "query" | "key" | "value" | "out") -> ``[tokens, heads, D]`` of each step.
        blocks: one entry per call of the scheduler.
        preemptions: request -> number of preemptions so far.
        slots: slots of each cartridge, by name.
    """

    llm: object
    retained: dict[str, dict[int, list[Held]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    tensors: dict[tuple, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    blocks: list[Blocks] = field(default_factory=list)
    preemptions: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def runner(self):
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def manager(self):
        return self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]

    def attach(self, patch) -> None:
        """Wrap the layers' forward and the scheduler until ``patch`` is undone."""
        forward, schedule = FixedBudgetImpl.forward, self.scheduler.schedule

        def recorded_forward(impl, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs):
            result = forward(impl, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
            if metadata is not None and impl.vllm_config is self.llm.llm_engine.vllm_config:
                tensors = {"query": query, "key": key, "value": value, "out": output}
                self._after_layer(impl, kv_cache, metadata, tensors)
            return result

        def recorded_schedule(*args, **kwargs):
            result = schedule(*args, **kwargs)
            self._after_schedule()
            return result

        patch.setattr(FixedBudgetImpl, "forward", recorded_forward)
        patch.setattr(self.scheduler, "schedule", recorded_schedule)

    def clear(self) -> None:
        for records in (self.retained, self.tensors, self.blocks, self.preemptions):
            records.clear()

    def forget(self, name: str) -> None:
        """Drop the records of a request."""
        for records in (self.retained, self.preemptions):
            records.pop(name, None)
        for key in [key for key in self.tensors if key[0] == name]:
            del self.tensors[key]

    def _after_layer(self, impl, kv_cache, metadata, tensors: dict[str, torch.Tensor]) -> None:
        """Record every request of the batch, which is read from the runner's own ids and lengths."""
        batch, starts = self.runner.input_batch, self.runner.query_start_loc.np.tolist()
        for i, name in enumerate(batch.req_ids):
            first, last = starts[i], starts[i + 1]
            if self.runner.speculative_config is not None:  # drafts are taken back
                last -= max(0, int(self.runner.num_decode_draft_tokens.np[i]))
            tokens_seen = int(batch.num_computed_tokens_cpu[i]) + last - first
            for part, tensor in tensors.items():
                self.tensors[name, impl.layer, part].append(tensor[first:last].clone())
            ends = impl.policy.compresses and tokens_seen == self.scheduler.requests[name].num_prompt_tokens
            whole_prompt = torch.ones(impl.num_kv_heads, tokens_seen)  # its last token has seen all of it
            retained = whole_prompt if ends else held_by_request(impl, kv_cache, metadata, last, tokens_seen)
            positions = [head.nonzero().flatten().tolist() for head in retained]
            self.retained[name][impl.layer].append(Held(tokens_seen, last - first, positions))

    def _sizes(self, request) -> tuple[int, int, int] | None:
        """Return p, B and w of a request from what it asks for, independently of the block manager."""
        config, asks = self.llm.llm_engine.vllm_config, request.sampling_params.extra_args or {}
        if not requested(config):
            return None
        policy = engine_policy(config)
        protect = asks.get("kv_protect_prompt", policy.protect)
        slots = sum(self.slots[name] for name in asks.get("kv_cartridges", ()))
        protected = slots + protected_tokens(True if protect == "all" else protect, request.num_prompt_tokens - slots)
        retention = policy.retention_of(asks["kv_budget"]) if "kv_budget" in asks else policy.retention
        return protected, retention.budget, retention.window

    def _after_schedule(self) -> None:
        running = {}
        for request in self.scheduler.running:
            name = request.request_id
            blocks = [block.block_id for block in self.manager.req_to_blocks[name]]
            last = request.num_prompt_tokens + request.max_tokens + self.scheduler.num_spec_tokens
            running[name] = request.num_computed_tokens, last, self._sizes(request), blocks
        for request in self.scheduler.requests.values():
            self.preemptions[request.request_id] = request.num_preemptions
        self.blocks.append(Blocks(running, self.pool.get_num_free_blocks()))


def held_by_request(impl, kv_cache: torch.Tensor, metadata, last: int, tokens_seen: int) -> torch.Tensor:
    """Return which tokens a request of the running step retains after a layer.

    Args:
        impl: the layer's attention.
        kv_cache: the layer's cache.
        metadata: the step's metadata.
        last: index after the request's last token in the flat batch.
        tokens_seen: tokens of the request, this step included.

    Returns:
        ``[H, tokens_seen]`` booleans.
    """
    rule, (pages, shares, blocks) = impl.attention.rule, impl._bind(kv_cache)
    batch, after, made_row = metadata.batch(impl.layer, shares), None, None
    ends = [first + length for first, length in zip(batch.chunks.firsts, batch.chunks.lengths, strict=True)]
    if last in ends:
        part = batch.chunks.part(ends.index(last))
        (after,), (window,), (end,), prefix = part.after, part.windows, part.ends, part.prefix
        table, budgets, row = part.table[0], part.budgets[0], 0
        if (after is not None or any(part.follows)) and rule.compression.adaptive_head_budgets:
            (budgets,), (table,) = load_page_table(pages, part.table, rule.compression)
    else:
        place = last - 1 - (batch.flat.start or 0)
        row = place if isinstance(batch.tokens, slice) else batch.tokens.tolist().index(place)
        table, budgets, window, prefix = batch.table[row], batch.budgets[row], int(batch.windows[row]), batch.prefix
        end = int(batch.positions[row]) + 1
    tokens = 0 if prefix is None else int(prefix.tokens[row])
    if rule.compresses and after is None and end > tokens:
        after = RequestSlots(tokens, tokens, 0, window, shift=tokens_seen - end)
        made_row = prefix and prefix.table[row]
        rule = replace(rule, window=after.window)
        return held_after_prompt(pages, table, tokens_seen, rule, budgets, after, blocks, made_row)
    if pages.raw.device.type != "cpu":
        pages = pages.layout.view(pages.raw.cpu())
    return held_tokens(pages, table.cpu(), tokens_seen, replace(rule, window=window), budgets.cpu(), tokens)
