"""Attention backend on NVIDIA GPUs: :mod:`kvpop_vllm.vllm_glue.run.backend` with CUDA-graph-safe metadata."""

from __future__ import annotations

import itertools
import operator
from typing import ClassVar

import torch
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.attention.backend import AttentionCGSupport

from kvpop_vllm.attention.profile_run import worst_case_batches
from kvpop_vllm.cache.device_rows import DeviceRows, leading_decodes
from kvpop_vllm.cache.pages import Prefix
from kvpop_vllm.cache.step import RequestBlocks, Span, StepPlan, numbers_of, rows_of
from kvpop_vllm.kernels import ops
from kvpop_vllm.requests import NUMBERS, RequestSlots
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

SIZES = operator.attrgetter(*(name for name in NUMBERS if name not in ("prefix", "made_slots", "seed")))
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
                # for each token and head: its output, log-sum-exp and slots in use
                scratch = query.new_empty(*query.shape[:2], self.head_size + 24 // query.itemsize)
            self.attend(query[:n], key[:n], value[:n], pages, batch, output[:n], gate_scores, pages)
            del scratch


class CudaMetadataBuilder(FixedBudgetMetadataBuilder):
    """Metadata builder whose tensors keep their addresses and are filled without waiting for the device.

    Full CUDA graphs are declared only for batches of one token per request. In other batches prefill chunks
    differ from step to step, and vLLM runs attention outside of its graphs. Positions, slots in use and
    tables come from the device's own lengths and block table. Chunks come from the host's lengths, which are
    exact because speculative decoding is refused.

    A buffer may be filled for a step while the previous step still runs: both, and the kernels that read the
    buffer, are on one stream.

    A tail that begins in a decode row is begun here, for all layers and before any of them runs, because the
    step may be a CUDA graph's. All protected tokens of that request have been written by earlier steps: it
    has computed the last one itself (:mod:`kvpop_vllm.vllm_glue.run.manager_requests`).
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        longest = vllm_config.model_config.max_model_len
        self.rows = DeviceRows(
            self.layout,
            self.padding,
            vllm_config.scheduler_config.max_num_seqs,
            kv_cache_spec.blocks(longest, kv_cache_spec.slots(budget=kv_cache_spec.max_budget)),
            None if kv_cache_spec.shares is None else for_config(vllm_config).shares(),
            device,
            kv_cache_spec.longest_prefix(longest),
        )
        self.sized = False  # whether any request has had a budget of its own

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> FixedBudgetMetadata | None:
        """Return the metadata of a step, or None for a dummy run of longer requests, whose outputs are 0.

        Runner V2 makes hundreds of such dummy runs before it serves.
        """
        common = common_attn_metadata
        firsts = common.query_start_loc_cpu.tolist()
        counts = [after - before for before, after in itertools.pairwise(firsts)]
        rows, requests = leading_decodes(counts), len(counts)
        lengths_matter = rows < requests or self.rows.protects
        lengths = common.seq_lens_cpu_upper_bound.tolist() if lengths_matter else [0] * requests
        starts = [length - count for length, count in zip(lengths, counts, strict=False)]
        chunked = [i for i in range(rows, requests) if counts[i]]
        if any(not starts[i] and not common.is_prefilling[i] for i in chunked):
            return None  # a chunk that starts at position 0, yet past its prompt
        slots = self.slots(requests, dummy=not any(common.is_prefilling[:requests]))
        table, sent = common.block_table_tensor, self._sent(slots)
        self.rows.fill(rows, common.seq_lens, table, common.slot_mapping, sent)
        spans = [Span(i - rows, firsts[i], starts[i], counts[i], slots[i]) for i in chunked]
        view = self.rows.view(rows, self.policy.draws, self.spec.may_have_cartridges)
        if self.rows.protects:
            self._begin_tails([i for i in range(rows) if slots[i].begins_tail(starts[i], starts[i] + 1)], slots)
        widths = self.rows.table.shape[1], self.rows.prefix_table.shape[1]
        blocks = RequestBlocks.of_rows(table[rows:requests], slots[rows:], self.layout.block_slots, widths=widths)
        return FixedBudgetMetadata(StepPlan(self.layout, spans, blocks, rows=view, checks=False), firsts[-1])

    def _sent(self, slots: list[RequestSlots]) -> dict[str, torch.Tensor]:
        """Return the numbers of a step's requests that differ from what the device has, for :meth:`DeviceRows.fill`.

        Budgets, windows and the like are sent from the first step on that has a request with others than the server's:
        a row keeps what it was sent until it is sent something else.
        """
        server = SIZES(self.padding)
        send = self.sized = self.sized or (not self.unequal and any(SIZES(record) != server for record in slots))
        needed = {"prefix": self.rows.protects, "made_slots": self.spec.may_have_cartridges, "seed": self.policy.draws}
        tensors = numbers_of(slots, [name for name in NUMBERS if needed.get(name, send)])
        if send:
            tensors["budget"] = tensors["budget"].unsqueeze(1).repeat(1, self.layout.num_kv_heads)
        pinned = is_pin_memory_available()
        return {name: tensor.pin_memory() if pinned else tensor for name, tensor in tensors.items()}

    def _begin_tails(self, rows: list[int], slots: list[RequestSlots]) -> None:
        """Begin the tails of some decode rows in all layers; a row of padding has null blocks.

        ``slots`` are those of all requests of the step.
        """
        if not rows:
            return
        table, prefix_table = (rows_of(x, rows) for x in (self.rows.table, self.rows.prefix_table))
        numbers = numbers_of([slots[i] for i in rows], ("prefix", "made_slots", "budget", "window"))
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            impl = layers[name].impl
            pages, shares, blocks = impl._bind(layers[name].kv_cache)
            _, tails = shares.place(impl.layer, table, (), numbers["budget"], numbers["window"])
            prefix = Prefix(blocks, prefix_table, numbers["prefix"], numbers["made_slots"])
            ops.begin_tail(pages, tails, prefix, rule=impl.attention.rule, impl=impl.attention.impl)
