"""Recorder of an engine in this process: held tokens after every layer call, and blocks at every step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from vllm.model_executor.models.utils import extract_layer_index

from kvpop_vllm.kernels.pages import cdiv
from kvpop_vllm.kernels.retained import EMPTY, filled_slots, slot_positions
from kvpop_vllm.vllm_glue.backend import FixedBudgetImpl, FixedBudgetMetadataBuilder
from kvpop_vllm.vllm_glue.engine_policy import engine_policy, requested


class Held(NamedTuple):
    """Tokens held by a request after one layer call: after ``seen`` tokens, ``new`` of them in this step."""

    seen: int
    new: int
    positions: list[list[int]]  # per head, sorted


class Row(NamedTuple):
    """One request of the batch that the model runner has built.

    Attributes:
        request: internal id.
        first: index of its first token in the batch.
        new: tokens in this step.
        seen: tokens including this step.
        blocks: its row of the block table.
        protected: number of its protected tokens.
        budget: its own budget, or None.
    """

    request: str
    first: int
    new: int
    seen: int
    blocks: torch.Tensor
    protected: int
    budget: int | None


@dataclass
class Blocks:
    """Blocks after one call of the scheduler.

    Attributes:
        running: request -> (tokens scheduled so far, its blocks).
        free: number of free blocks.
        protected: request -> number of protected tokens.
        budgets: request -> its own budget, if it asked for one.
    """

    running: dict[str, tuple[int, list[int]]]
    free: int
    protected: dict[str, int]
    budgets: dict[str, int]


@dataclass
class Recorder:
    """Recorder of an engine's requests while it is attached.

    Attributes:
        held: request -> layer -> one :class:`Held` per step, in order.
        tensors: (request, layer, "query" | "key" | "value" | "out") -> ``[tokens, heads, D]``, as of a
            token's last step.
        blocks: one entry per call of the scheduler.
        preemptions: request -> number of preemptions so far.
        windows: budget that a request may ask for -> its window.
    """

    llm: object
    held: dict[str, dict[int, list[Held]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    tensors: dict[tuple, torch.Tensor] = field(default_factory=dict)
    blocks: list[Blocks] = field(default_factory=list)
    preemptions: dict[str, int] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    _rows: list[Row] = field(default_factory=list)
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)

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
        """Wrap the metadata builder, the layers' forward and the scheduler until ``patch`` is undone."""
        builder = type(self.runner.attn_groups[0][0].get_metadata_builder())
        ours = builder if issubclass(builder, FixedBudgetMetadataBuilder) else FixedBudgetMetadataBuilder
        build, forward, schedule = ours.build, FixedBudgetImpl.forward, self.scheduler.schedule

        def recorded_build(builder, common_prefix_len, common, *args, **kwargs):
            self._rows = self._batch(common)
            return build(builder, common_prefix_len, common, *args, **kwargs)

        def recorded_forward(impl, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs):
            result = forward(impl, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)
            if metadata is not None:
                self._after_layer(impl, extract_layer_index(layer.layer_name), kv_cache, query, key, value, output)
            return result

        def recorded_schedule(*args, **kwargs):
            result = schedule(*args, **kwargs)
            self._after_schedule()
            return result

        patch.setattr(ours, "build", recorded_build)
        patch.setattr(FixedBudgetImpl, "forward", recorded_forward)
        patch.setattr(self.scheduler, "schedule", recorded_schedule)

    def clear(self) -> None:
        for records in (self.held, self.tensors, self.blocks, self.preemptions, self._seen):
            records.clear()

    def forget(self, name: str) -> None:
        """Drop the records of a request."""
        for records in (self.held, self.preemptions, self._seen):
            records.pop(name, None)
        for key in [key for key in self.tensors if key[0] == name]:
            del self.tensors[key]

    def _batch(self, common) -> list[Row]:
        """Return the batch from the runner's own request ids, independent of the backend's metadata."""
        starts, seen, rows = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist(), []
        for i, name in enumerate(self.runner.input_batch.req_ids):
            new, blocks = starts[i + 1] - starts[i], common.block_table_tensor[i].clone()
            own = self.protected(name), self.asked(name).get("kv_budget")
            rows.append(Row(name, starts[i], new, seen[i], blocks, *own))
            came = seen[i] - new, self.scheduler.requests[name].num_preemptions
            if came != self._seen.get(name, (0, 0)):  # other requests may compute what it skips
                for key, known in self.tensors.items():
                    if key[0] == name:
                        known[: seen[i] - new] = torch.nan
            self._seen[name] = seen[i], came[1]
        return rows

    def asked(self, name: str) -> dict:
        """Return the options that the request sets for its cache."""
        return self.scheduler.requests[name].sampling_params.extra_args or {}

    def protected(self, name: str) -> int:
        """Return the number of protected tokens of a request, from the scheduler's prompt length."""
        config = self.llm.llm_engine.vllm_config
        protect = engine_policy(config).protect if requested(config) else 0
        protect = self.asked(name).get("kv_protect_prompt", protect)
        prompt = self.scheduler.requests[name].num_prompt_tokens
        return prompt if protect is True or protect == "all" else min(protect, prompt)

    def _after_layer(self, impl, layer: int, kv_cache, query, key, value, out) -> None:
        rule, layout, retention = impl.attention.rule, impl.attention.layout, impl.policy.retention
        pages, regions, natural = impl._bind(kv_cache)
        for row in self._rows:
            last = row.first + row.new
            for name, tensor in (("query", query), ("key", key), ("value", value), ("out", out)):
                self._remember(name, row, layer, tensor[row.first : last])
            assert (rule.sinks, rule.window) == (retention.sinks, retention.window)
            if not (rule.compresses and row.seen > row.protected):
                self._check_prefix(natural, row, layer)
            prefix = list(range(min(row.seen, row.protected)))
            positions = [prefix] * layout.num_kv_heads
            if row.seen > row.protected:
                prefix = [] if rule.compresses else prefix
                tail = row.blocks[cdiv(row.protected, layout.block_slots) :]
                table, own = tail.expand(layout.num_kv_heads, -1), retention
                if row.budget is not None:
                    own = replace(own, budget=row.budget, window=self.windows[row.budget])
                budgets = [own.budget] * layout.num_kv_heads
                if regions is not None:
                    (budgets,), (table,) = regions.place(layer, tail.unsqueeze(0), [True])
                    budgets = budgets.tolist()
                filled = filled_slots(pages, table) if rule.threshold is not None else None
                behind = 0 if rule.compresses else row.protected
                kept = [replace(own, budget=budget).behind(behind) for budget in budgets]
                slots = _slots_of_heads(pages, table, row.seen, kept, filled)
                self._check_content(pages, row, layer, slots, table)
                positions = [prefix + sorted(t for t in head if t != EMPTY) for head in slots.tolist()]
            self.held[row.request][layer].append(Held(row.seen, row.new, positions))

    def _remember(self, name: str, row: Row, layer: int, new: torch.Tensor) -> None:
        known = self.tensors.get((row.request, layer, name))
        if known is None:
            longest = self.llm.llm_engine.vllm_config.model_config.max_model_len
            known = self.tensors[row.request, layer, name] = new.new_full((longest, *new.shape[1:]), torch.nan)
        known[row.seen - row.new : row.seen] = new

    def _check_prefix(self, pages, row: Row, layer: int) -> None:
        """Check that the key and value of each protected token lie in its slot, for every head.

        They must equal the tensors of this request to the bit where this request computed them.
        """
        size = pages.layout.block_slots
        t = torch.arange(min(row.seen, row.protected))
        for name, array in (("key", pages.k), ("value", pages.v)):
            stored, given = array[row.blocks[t // size].long(), :, t % size], self.tensors[row.request, layer, name][t]
            own = ~given.isnan().flatten(1).any(1)
            assert stored.isfinite().all() and torch.equal(stored[own], given[own]), (
                f"request {row.request}, layer {layer}: a protected token has another {name}, off by {(stored - given)[own].abs().max()}"
            )

    def _check_content(self, pages, row: Row, layer: int, slots: torch.Tensor, table: torch.Tensor) -> None:
        """Check that every filled slot holds, to the bit, the key and value of its token."""
        layout, at = pages.layout, (slots != EMPTY).any(0).nonzero().flatten()
        slots = slots[:, at]
        head = torch.arange(len(slots)).unsqueeze(1)
        blocks = table[:, layout.state_blocks + at // layout.block_slots].long()
        for name, array in (("key", pages.k), ("value", pages.v)):
            stored = array[blocks, head, at % layout.block_slots]  # [H, slots, D]
            given = self.tensors[row.request, layer, name][slots.clamp_min(0), head]
            known = (slots != EMPTY) & ~given.isnan().any(-1)  # another request computed the tokens of a hit
            assert stored[slots != EMPTY].isfinite().all() and torch.equal(stored[known], given[known]), (
                f"request {row.request}, layer {layer}: a slot holds another {name}"
            )

    def _after_schedule(self) -> None:
        running, protected, budgets = {}, {}, {}
        for request in self.scheduler.running:
            if (budget := self.asked(request.request_id).get("kv_budget")) is not None:
                budgets[request.request_id] = budget
            protected[request.request_id] = self.protected(request.request_id)
            held = [block.block_id for block in self.manager.req_to_blocks[request.request_id]]
            running[request.request_id] = request.num_computed_tokens, held
        for request in self.scheduler.requests.values():
            self.preemptions[request.request_id] = request.num_preemptions
        self.blocks.append(Blocks(running, self.pool.get_num_free_blocks(), protected, budgets))


def _slots_of_heads(pages, table, seen: int, kept: list, filled) -> torch.Tensor:
    """Return positions ``[H, slots]`` like ``slot_positions``, for heads with their own retention each."""
    known = {retention: slot_positions(pages, table, seen, retention, filled) for retention in set(kept)}
    found = torch.full((len(kept), max(slots.shape[1] for slots in known.values())), EMPTY)
    for h, retention in enumerate(kept):
        found[h, : known[retention].shape[1]] = known[retention][h]
    return found
