"""Recorder of what the caches of requests hold, for the inspect page (``--kv-inspect``).

After each step the scheduler asks the workers which tokens each head still holds of each running request, and notes
when a token is missing for the first time. An engine without the flag has no recorder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from kvpop_vllm.cache.pages import Pages, cdiv
from kvpop_vllm.cache.step import StepPlan, plan_batch
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.rules.retained import held_after_prompt, held_tokens
from kvpop_vllm.vllm_glue.extras.cartridges import layers_of
from kvpop_vllm.vllm_glue.extras.reports import kept_by_head, manager_of, managers_of, report, use_of
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetManager
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy

ENDED = 8
"""Number of ended requests that are remembered."""
ROOM = 256
"""Least number of tokens by which the record of a request grows."""


class Row(NamedTuple):
    """Request as the workers receive it: tokens seen, blocks in each cache group of the policy, and slots."""

    tokens_seen: int
    groups: list[list[int]]
    slots: RequestSlots

    @classmethod
    def of(cls, scheduler, request, tokens: int) -> Row:
        """Return the row of a request of the scheduler with ``tokens`` tokens in its cache."""
        managers = managers_of(scheduler)
        rows = (manager.req_to_blocks[request.request_id] for manager in managers)
        return cls(tokens, [[block.block_id for block in row] for row in rows], managers[0].slots(request))

    def blocks(self, layer: int) -> list[int]:
        """Return the blocks of a layer of the policy. Layers go to the groups in turn."""
        return self.groups[layer % len(self.groups)]


@dataclass
class Record:
    """Record of a request.

    Attributes:
        report: its numbers, as in :func:`kvpop_vllm.vllm_glue.extras.reports.report`.
        tokens: ids of the prompt and of the answer so far.
        length: number of tokens that its cache has processed.
        left: ``[layers, H, room]`` int32, for each token the number of tokens that had been seen when it was first
            missing, 0 while it is held.
        starts: number of times that it has been preempted.
        error: reason why the pages could not be read, or None.
    """

    report: dict
    tokens: list[int]
    left: np.ndarray
    length: int = 0
    starts: int = 0
    error: str | None = None

    def note(self, length: int, held_mask: np.ndarray) -> None:
        """Note which tokens are held, ``held_mask [layers, H, length]``."""
        # the array doubles, so that a long answer does not copy it at each token
        if (have := self.left.shape[2]) < length:
            self.left = np.pad(self.left, ((0, 0), (0, 0), (0, max(length + ROOM, 2 * have) - have)))
        left = self.left[..., :length]
        left[held_mask] = 0
        left[~held_mask & (left == 0)] = length
        self.length = length

    def summary(self, state: str) -> dict:
        """Return the numbers of the request, with the tokens that its heads hold by count."""
        numbers = {**self.report, "state": state, "seen_tokens": self.length, "error": self.error}
        held_counts = (self.left[..., : self.length] == 0).sum(-1)
        if held_counts.size and self.error is None:
            numbers |= kept_by_head(
                self.length, int(held_counts.min()), float(held_counts.mean()), int(held_counts.max())
            )
        return numbers


@dataclass
class Inspector:
    """Records of the requests of one engine.

    Args:
        scheduler: scheduler of the engine.
        manager: its block manager.
        run: runs a function of this module in every worker, and returns their results.
    """

    scheduler: Any
    manager: FixedBudgetManager
    run: Callable[[Callable, tuple], list]
    records: dict[str, Record] = field(default_factory=dict)
    ended: deque[tuple[str, Record]] = field(default_factory=lambda: deque(maxlen=ENDED))

    def __post_init__(self):
        self.policy = engine_policy(self.scheduler.vllm_config)
        self.shape = self.policy.model.num_layers, self.policy.model.num_kv_heads

    def update(self, scheduler_output) -> None:
        """Record what the requests of a step hold after the steps that have been started.

        Drafts of speculative decoding are not in their caches yet.
        """
        self._forget_ended()
        to_read, drafts = [], scheduler_output.scheduled_spec_decode_tokens
        for request in self.scheduler.running:
            name = request.request_id
            if name not in scheduler_output.num_scheduled_tokens:
                continue
            tokens = request.num_computed_tokens - len(drafts.get(name, ()))
            row, record = Row.of(self.scheduler, request, tokens), self._record(request)
            # nothing is evicted from a prefix, so that the workers need not be asked
            if row.tokens_seen < row.slots.prefix + (not self.policy.compresses):
                record.note(row.tokens_seen, np.ones((*self.shape, row.tokens_seen), bool))
            else:
                to_read.append((row, record))
        rows = [row for row, _ in to_read]
        replies = self.run(held_in_worker, (rows,)) if rows else []
        error = next((reply for reply in replies if isinstance(reply, str)), None)
        for i, (row, record) in enumerate(to_read):
            record.error = error
            if error is None:
                record.note(
                    row.tokens_seen, self._joined([layer for reply in replies for layer in reply], i, row.tokens_seen)
                )

    def _record(self, request) -> Record:
        """Return the record of a request, with its latest numbers and tokens."""
        latest = report(self.scheduler, self.manager, request, use_of(self.scheduler, self.manager, request))
        record = self.records.setdefault(request.request_id, Record({}, [], np.zeros((*self.shape, 0), np.int32)))
        if record.starts != request.num_preemptions:  # its cache begins again
            record.starts, record.length = request.num_preemptions, 0
            record.left[:] = 0
        record.report, record.tokens = latest, list(request.all_token_ids)
        return record

    def _joined(self, layers: list[tuple], i: int, length: int) -> np.ndarray:
        """Return the tokens ``[layers, H, length]`` that request i holds, from the layers and heads of all workers."""
        held_mask = np.zeros((*self.shape, length), bool)
        for layer, first, rows in layers:
            bits = np.unpackbits(rows[i], axis=-1, count=length).astype(bool)
            held_mask[layer, first : first + len(bits)] = bits
        return held_mask

    def _forget_ended(self) -> None:
        """Move the records of requests that have ended out of the way."""
        for name in self.records.keys() - self.scheduler.requests.keys():
            self.ended.append((name, self.records.pop(name)))

    def summaries(self) -> dict:
        """Return the policy, the shape of the model, and the numbers of all requests, ended ones last."""
        self._forget_ended()
        running = {request.request_id for request in self.scheduler.running}
        summaries = {}
        for name, request in self.scheduler.requests.items():
            summaries[name] = self._record(request).summary("running" if name in running else "waiting")
        for name, record in reversed(self.ended):
            summaries.setdefault(name, record.summary("ended"))
        layers, heads = self.shape
        answer = {"policy": self.policy.name, "budget": self.policy.retention.budget, "layers": layers, "heads": heads}
        answer["model_layers"] = self.policy.model.model_layers
        return answer | {"requests": [{"id": name} | numbers for name, numbers in summaries.items()]}

    def details(self, name: str) -> dict | None:
        """Return the tokens of a request and when they left each head, or None if it is not known."""
        self._forget_ended()
        if (request := self.scheduler.requests.get(name)) is not None:
            record, state = self._record(request), "running" if request in self.scheduler.running else "waiting"
        elif (record := next((record for ended, record in reversed(self.ended) if ended == name), None)) is not None:
            state = "ended"
        else:
            return None
        length = min(record.length, len(record.tokens))
        left = np.ascontiguousarray(record.left[..., :length], "<i4")
        answer = {"id": name, "tokens": record.tokens[:length], "left": left.tobytes()}
        return record.summary(state) | answer


def start(original, self, *args, **kwargs) -> None:
    """Wrap a step of an engine's start: give it a recorder."""
    original(self, *args, **kwargs)
    manager, rpc = manager_of(self.scheduler), self.model_executor.collective_rpc
    if manager is not None and manager.kv_cache_spec.inspect:
        manager.inspector = Inspector(
            self.scheduler, manager, lambda function, arguments: rpc(function, args=arguments)
        )


def update_from_output(original, self, scheduler_output, *args, **kwargs):
    """Wrap the end of a step: record what its requests hold."""
    manager = manager_of(self)
    if manager is not None and manager.inspector is not None and scheduler_output.total_num_scheduled_tokens:
        manager.inspector.update(scheduler_output)
    return original(self, scheduler_output, *args, **kwargs)


def summaries(self) -> dict:
    """Return the numbers of an engine's requests. See :meth:`Inspector.summaries`."""
    return manager_of(self.scheduler).inspector.summaries()


def details(self, name: str) -> dict | None:
    """Return what a request holds. See :meth:`Inspector.details`."""
    return manager_of(self.scheduler).inspector.details(name)


# workers


def held_in_worker(worker, rows: list[Row]) -> list[tuple[int, int, list[np.ndarray]]] | str:
    """Return the tokens that requests hold in each layer of a worker.

    Returns:
        For each layer its index, the first of its KV heads here, and for each request ``[H, bytes]`` with one bit per
        token. Or the text of an error, because replies after an exception would stay unread.
    """
    try:
        packed = (
            (layer, first, [np.packbits(tensor.numpy(), axis=-1) for tensor in tensors])
            for layer, first, tensors in held_by_layer(worker, rows)
        )
        return list(packed)
    except Exception as error:
        return str(error) or type(error).__name__


def held_by_layer(worker, rows: list[Row]) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """Yield for each layer its index, the first of its KV heads here, and the tokens ``[H, seen]`` that each request holds.

    Args:
        worker: worker of vLLM, or the engine that it is a part of.
        rows: requests with as many tokens in their caches.
    """
    from kvpop_vllm.vllm_glue.run.backend import for_config

    heads_of, plans = for_config(worker.vllm_config).heads, {}
    for impl, pages, shares, blocks in layers_of(worker):
        group = impl.layer % len(rows[0].groups)
        plan = plans[group] = plans.get(group) or _next_step(impl, rows, blocks)
        batch = plan.batch(shares, impl.layer)
        held_masks = [
            _held_by(impl, pages, blocks, row, batch.table[i], batch.budgets[i]) for i, row in enumerate(rows)
        ]
        yield impl.layer, heads_of(impl.num_kv_heads).start, held_masks


def _next_step(impl, rows: list[Row], pages: Pages) -> StepPlan:
    """Return the plan of a step with one more token of each request, which says where their pages lie in a layer."""
    lists = [row.blocks(impl.layer) for row in rows]
    table = torch.zeros(len(rows), max(map(len, lists)), dtype=torch.int32)
    for i, blocks in enumerate(lists):
        table[i, : len(blocks)] = torch.tensor(blocks)
    slots, lengths = (
        [row.slots._replace(seed=None) for row in rows],
        [row.tokens_seen + 1 for row in rows],
    )  # nothing is drawn
    compression = impl.policy.compression
    after = compression and [compression.after(record) for record in slots]
    return plan_batch(pages.layout, slots, [1] * len(rows), lengths, table.to(pages.raw.device), after)


def _held_by(impl, pages: Pages, blocks: Pages, row: Row, table: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
    """Return which tokens ``[H, seen]`` a request holds in one layer, whose pages are ``table [H, P]``."""
    if pages.raw.device.type != "cpu":  # copy the pages of this request alone
        used, table = table.unique(return_inverse=True)
        pages, table = pages.layout.view(pages.raw[used.long()].cpu()), table.cpu()
    rule, budgets, slots = impl.attention.rule, budgets.cpu(), row.slots
    if (compression := impl.policy.compression) is None:
        return held_tokens(pages, table, row.tokens_seen, replace(rule, window=slots.window), budgets, slots.prefix)
    after, size = compression.after(slots), pages.layout.block_slots
    first = cdiv(slots.prefix, size)
    made_blocks = torch.tensor(row.blocks(impl.layer)[first : first + cdiv(after.made_slots, size)])
    rule = replace(rule, window=after.window)
    return held_after_prompt(pages, table, row.tokens_seen, rule, budgets, after, blocks, made_blocks)
