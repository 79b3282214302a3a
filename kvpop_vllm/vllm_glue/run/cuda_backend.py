"""Attention backend on NVIDIA GPUs: :mod:`kvpop_vllm.vllm_glue.run.backend` with CUDA-graph-safe metadata."""

from __future__ import annotations

import itertools
import operator
from typing import ClassVar

import torch
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.attention.backend import AttentionCGSupport

from kvpop_vllm.attention.profile_run import worst_case_batches, worst_case_between
from kvpop_vllm.cache.device_rows import NULL_BLOCK, DeviceRows, leading_decodes
from kvpop_vllm.cache.pages import Prefix
from kvpop_vllm.cache.step import Between, RequestBlocks, StepPlan, numbers_of, rows_of, span_of
from kvpop_vllm.kernels import ops
from kvpop_vllm.policies.base import Order
from kvpop_vllm.requests import NUMBERS, RequestSlots
from kvpop_vllm.rules import rounds
from kvpop_vllm.supported import DTYPES, HEAD_SIZES
from kvpop_vllm.vllm_glue.run.backend import (
    FixedBudgetBackend,
    FixedBudgetImpl,
    FixedBudgetMetadata,
    FixedBudgetMetadataBuilder,
    for_config,
)
from kvpop_vllm.vllm_glue.run.cache_spec import longest_prefix
from kvpop_vllm.vllm_glue.start import cuda

SIZES = operator.attrgetter("budget", "window")
"""Numbers of a request that are the server's unless it asks for others."""
_REASONS = {
    "head_size not supported": f"head sizes are {', '.join(map(str, HEAD_SIZES))}",
    "dtype not supported": "--dtype is {}, {} or {}".format(*DTYPES["cuda"]),
    "kv_cache_dtype not supported": "--kv-cache-dtype is the model's own",
    "block_size not supported": "--block-size is a multiple of 16",
    "compute capability not supported": "kernels are for GPUs from compute capability 8.0 on",
    "batch invariance not supported": "unset VLLM_BATCH_INVARIANT",
}
"""Change that removes one of vLLM's reasons; for any other reason the policy must be left out."""


class CudaBackend(FixedBudgetBackend):
    """Attention backend that vLLM selects as CUSTOM.

    vLLM looks a selected backend up again by :meth:`full_cls_name`.
    """

    late: ClassVar[bool] = True
    supported_dtypes: ClassVar[list] = [getattr(torch, name) for name in DTYPES["cuda"]]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM selects this backend."""
        return "CUSTOM"

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Return module and name of the registered path, which resolves to this class."""
        module, _, name = cuda.BACKEND.rpartition(".")
        return module, name

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the head sizes that the kernels take."""
        return list(HEAD_SIZES)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True: a layer's constructor refuses windows that a request can exceed, and others hide nothing."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        """Return whether the kernels run on a GPU of this compute capability."""
        return capability.major >= 8

    @staticmethod
    def get_impl_cls():
        """Return the implementation class."""
        return CudaImpl

    @staticmethod
    def get_builder_cls():
        """Return the metadata builder class."""
        return CudaMetadataBuilder

    @classmethod
    def validate_configuration(cls, *args, **kwargs) -> list[str]:
        """Return vLLM's reasons against this backend as one line with what to change, or nothing."""
        if not (reasons := super().validate_configuration(*args, **kwargs)):
            return []
        changes = [f"{reason}: {_REASONS.get(reason, 'leave --kv-policy out')}" for reason in reasons]
        return [f"--kv-policy {cls.policy.name} cannot serve this; {'; '.join(changes)}"]


class CudaImpl(FixedBudgetImpl):
    """Attention of one layer, which runs the largest steps in vLLM's profiling run.

    The kernels allocate as they run. The profiling run comes before there is a cache and must see how much
    they allocate.
    """

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales, gate_scores=None, **more):
        """Write the layer's attention to ``output`` and return it.

        In a profiling run, run the largest steps first.
        """
        if attn_metadata is None and kv_cache.numel() == 0:
            self._run_worst_case_batches(query, key, value, output, gate_scores)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *scales, gate_scores=gate_scores, **more
        )

    def _run_worst_case_batches(self, query, key, value, output, gate_scores) -> None:
        """Run the largest possible steps; their results are overwritten or thrown away."""
        attention, budget, scheduler = self.attention, self.policy.max_budget, self.vllm_config.scheduler_config
        query = query[: scheduler.max_num_scheduled_tokens]
        budgets, most_slots = [budget] * self.num_kv_heads, budget
        if self.shares is not None:
            budgets, most_slots = self.shares.budgets[self.layer - self.shares.first], max(self.shares.counts)
        length = self.vllm_config.model_config.max_model_len
        longest = longest_prefix(length, self.policy.max_protect, *self.cartridges)
        limits = len(query), scheduler.max_num_seqs, length, query.device, longest
        steps = worst_case_batches(attention.rule, attention.layout, budgets, most_slots, *limits)
        for pages, batch, n in steps:
            scratch = None
            if len(batch.chunks) and attention.rule.sequential and n == 2:  # two tokens stand for all
                scratch = query.new_empty(*query.shape[:2], dtype=torch.float32)  # log-sum-exps
            # from the third layer of a step on, chunks repeat launches and hold all workspaces at once
            for _ in range(3 if len(batch.chunks) else 1):
                self.attend(query[:n], key[:n], value[:n], pages, batch, output[:n], gate_scores, pages)
            del scratch
        between = worst_case_between(attention.rule, attention.layout, budgets, length, query.device)
        if between is not None:
            pages, blocks, shares, due = between
            attention.between_steps(pages, blocks, shares, 0, due, self.num_heads // self.num_kv_heads)


class CudaMetadataBuilder(FixedBudgetMetadataBuilder):
    """Metadata builder whose tensors keep their addresses and are filled without waiting for the device.

    Full CUDA graphs are declared only for batches of equally many tokens per request: one, and with speculative
    decoding its drafts. In other batches prefill chunks differ from step to step, and vLLM runs attention outside of
    its graphs. Positions, drafts, slots in use and tables come from the device's own lengths and block table. So the
    device counts the drafts that were accepted, of which the host knows an upper bound. Chunks come from the host's
    lengths, which are exact for prompts. A chunk with as many tokens as a row may have, which vLLM may run in a graph,
    is a row: its tokens are drafts that will be accepted.

    A buffer may be filled for a step while the previous step still runs: both, and the kernels that read the
    buffer, are on one stream.

    A tail that begins in a decode row is begun here, for all layers and before any of them runs, because the
    step may be a CUDA graph's. All protected tokens of that request have been written by earlier steps: it
    has computed the last one itself (:mod:`kvpop_vllm.vllm_glue.run.manager_requests`). A tail that began among drafts
    is begun here when they have been accepted: the state is not read before, since no draft has left the window.

    What lies between two steps of a request is done here too: a round that is due, or the compression of a prompt with
    which the first one ended. The block manager frees such a prompt a step later (:attr:`FixedBudgetBackend.late`).
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        longest = vllm_config.model_config.max_model_len
        self.rows = DeviceRows(
            self.layout,
            self.padding,
            vllm_config.scheduler_config.max_num_seqs,
            kv_cache_spec.most_tail_blocks(longest),
            None if kv_cache_spec.shares is None else for_config(vllm_config).shares(),
            device,
            kv_cache_spec.longest_prefix(longest),
            self.policy.compression,
        )
        padding = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in (1, (1, 1), 2))
        lengths, table, firsts = padding
        places = torch.full((1,), -1, device=device)
        # compiles the kernel, which the profiling run does not launch
        ops.fill_rows(self.rows, 1, lengths, table, places, firsts if self.layout.drafts else None)
        self.sized = False  # whether any request has had a budget of its own
        self.sent_slots: list[RequestSlots] | None = None  # slots that the device has the numbers of
        self.rounds = self.policy.order is Order.ROUNDS and self.policy.layer_rule(0, slice(0, 1)).rounds
        self.may_have_made_slots = kv_cache_spec.may_have_cartridges or (
            self.policy.compresses and self.policy.compression.makes_slots
        )

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> FixedBudgetMetadata | None:
        """Return the metadata of a step, or None for a dummy run of longer requests, whose outputs are 0.

        Runner V2 makes hundreds of such dummy runs before it serves.
        """
        common, most_drafts = common_attn_metadata, self.layout.drafts
        firsts = common.query_start_loc_cpu.tolist()
        counts = [after - before for before, after in itertools.pairwise(firsts)]
        decodes, requests = leading_decodes(counts, 1 + most_drafts), len(counts)
        lengths_matter = decodes < requests or self.rows.protects or self.rounds
        lengths = common.seq_lens_cpu_upper_bound.tolist() if lengths_matter else [0] * requests
        starts = [length - count for length, count in zip(lengths, counts, strict=False)]
        chunked = [i for i in range(decodes, requests) if counts[i]]
        # at once, since each element of a tensor takes a microsecond to read
        prefilling = common.is_prefilling[:requests].tolist()
        if any(not starts[i] and not prefilling[i] for i in chunked):
            return None  # a chunk that starts at position 0, yet past its prompt
        slots = self.slots(requests, dummy=not any(prefilling))
        after = self.after and [self.after(record) for record in slots]
        table, sent = common.block_table_tensor, self._sent(slots, starts, after)
        resumed = most_drafts and any(starts[i] > slots[i].prefix for i in chunked)  # drafts may be staged
        rows, of_drafts = requests if resumed else decodes, ()
        if most_drafts:
            of_drafts = common.query_start_loc, decodes
        self.rows.receive(sent)
        ops.fill_rows(self.rows, rows, common.seq_lens, table, common.slot_mapping, *of_drafts)
        spans = [span_of(i - decodes, firsts[i], starts[i], counts[i], slots[i], after and after[i]) for i in chunked]
        view = self.rows.view(rows, self.policy.draws, self.may_have_made_slots)
        self._finish_steps([i for i in range(requests) if counts[i]], firsts, starts, slots, common)
        if self.rows.protects and not self.policy.compresses:
            near = [i for i in range(rows) if 0 <= starts[i] - slots[i].prefix <= most_drafts]
            self._begin_tails([i for i in near if slots[i].prefix], slots)
        widths = self.rows.table.shape[1], self.rows.prefix_table.shape[1]
        blocks = RequestBlocks.of_rows(
            table[decodes:requests], slots[decodes:], self.layout.block_slots, after and after[decodes:], widths
        )
        plan = StepPlan(self.layout, spans, blocks, rows=view, checks=False, late=True)
        return FixedBudgetMetadata(plan, firsts[-1])

    def _finish_steps(
        self, requests: list[int], firsts: list[int], starts: list[int], slots: list[RequestSlots], common
    ) -> None:
        """Do what lies between two steps of some requests, in all layers; a row of padding has null blocks.

        Args:
            requests: indices of those that have tokens.
            firsts: index of the first token of each request of the step.
            starts: position of that token.
            slots: slots of all requests.
            common: vLLM's metadata of the step.
        """
        due = [i for i in requests if self._is_due(starts[i], slots[i])]
        if not due:
            return
        real = rows_of(common.slot_mapping, [firsts[i] for i in due]) >= 0
        table = torch.where(real.unsqueeze(1), rows_of(common.block_table_tensor, due), NULL_BLOCK)
        records = [slots[i] for i in due]
        after = self.after and [self.after(record) for record in records]
        between = Between.of([starts[i] for i in due], records, after, table, self.layout.block_slots)
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            impl = layers[name].impl
            pages, shares, blocks = impl._bind(layers[name].kv_cache)
            group = impl.num_heads // impl.num_kv_heads
            impl.attention.between_steps(pages, blocks, shares, impl.layer, between, group)

    def _is_due(self, start: int, slots: RequestSlots) -> bool:
        """Return whether a prompt is compressed before the token at ``start``, or a layer may have a round there."""
        if self.policy.compresses:
            return start == slots.prefix > 0
        if not self.rounds or start <= slots.prefix:
            return False
        sizes = rounds.intervals(self.rounds.every, slots.budget, self.spec.sinks, slots.window)
        # equal heads have rounds together
        return any(start % every == 0 for every in (sizes if self.unequal else sizes[:1]))

    def _sent(
        self, slots: list[RequestSlots], starts: list[int], after: list[RequestSlots] | None
    ) -> dict[str, torch.Tensor]:
        """Return the numbers of a step's requests that differ from what the device has, for :meth:`DeviceRows.receive`.

        Budgets, windows and the like are sent from the first step on that has a request with others than the server's:
        a row keeps what it was sent until it is sent something else.

        Args:
            slots: slots of the requests.
            starts: positions of their first tokens.
            after: what each is after the end of its prompt, None if prompts are not compressed.
        """
        if after is not None:  # before the end of a prompt, the blocks of the slots to be made come after its own
            slots = [
                before._replace(left=later.made_slots) if start < before.prefix else later
                for before, start, later in zip(slots, starts, after, strict=True)
            ]
        if slots == self.sent_slots:  # as in most decode steps
            return {}
        self.sent_slots, server = slots, SIZES(self.padding)
        send = self.sized = self.sized or (not self.unequal and any(SIZES(record) != server for record in slots))
        needed = {"prefix": self.rows.protects, "made_slots": self.may_have_made_slots, "seed": self.policy.draws}
        needed |= dict.fromkeys(("shift", "left"), self.policy.compresses)
        tensors = numbers_of(slots, [name for name in NUMBERS if needed.get(name, send)])
        if send:
            tensors["budget"] = tensors["budget"].unsqueeze(1).repeat(1, self.layout.num_kv_heads)
        pinned = is_pin_memory_available()
        return {name: tensor.pin_memory() if pinned else tensor for name, tensor in tensors.items()}

    def _begin_tails(self, rows: list[int], slots: list[RequestSlots]) -> None:
        """Begin the tails of some decode rows in all layers; a row of padding has null blocks.

        With speculative decoding only the device knows which tails begin: those of rows at the end of their prefix, and
        of rows after it whose cache ends before it. The others get null blocks.

        Args:
            rows: indices of decode rows.
            slots: slots of all requests of the step.
        """
        if not rows:
            return
        table, prefix_table, positions = (
            rows_of(x, rows) for x in (self.rows.table, self.rows.prefix_table, self.rows.positions)
        )
        numbers = numbers_of([slots[i] for i in rows], ("prefix", "made_slots", "budget", "window"))
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            impl = layers[name].impl
            pages, shares, blocks = impl._bind(layers[name].kv_cache)
            _, tails = shares.place(impl.layer, table, (), numbers["budget"], numbers["window"])
            if self.layout.drafts:
                ends = rows_of(self.rows.numbers["prefix"], rows)
                counts = pages.position[tails[:, 0, self.layout.state_blocks].long(), 0, 0]
                begins = (positions == ends) | (positions > ends) & (counts <= ends)
                tails = torch.where(begins.view(-1, 1, 1), tails, NULL_BLOCK)
            prefix = Prefix(blocks, prefix_table, numbers["prefix"], numbers["made_slots"])
            ops.begin_tail(pages, tails, prefix, rule=impl.attention.rule, impl=impl.attention.impl)
