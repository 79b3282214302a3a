"""Attention backend on NVIDIA GPUs: :mod:`kvpop_vllm.vllm_glue.run.backend` with CUDA-graph-safe metadata."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.attention.backend import AttentionCGSupport

from kvpop_vllm.attention.device_batch import DecodeRows, Split
from kvpop_vllm.attention.prefill_chunks import made_of
from kvpop_vllm.attention.profile_run import worst_case_batches
from kvpop_vllm.attention.step_batch import RequestSettings
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.pages import Prefix
from kvpop_vllm.supported import DTYPES, HEAD_SIZES
from kvpop_vllm.vllm_glue.run import step_requests
from kvpop_vllm.vllm_glue.run.backend import (
    FixedBudgetBackend,
    FixedBudgetImpl,
    FixedBudgetMetadata,
    FixedBudgetMetadataBuilder,
)
from kvpop_vllm.vllm_glue.run.cache_spec import longest_prefix
from kvpop_vllm.vllm_glue.start import cuda

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
        budgets, most = [budget] * self.num_kv_heads, budget
        if self.shares is not None:
            budgets, most = self.shares.budgets[self.layer], max(self.shares.counts)
        length = self.vllm_config.model_config.max_model_len
        longest = longest_prefix(length, self.policy.max_protect, *self.cartridges)
        limits = len(query), scheduler.max_num_seqs, length, query.device, longest
        steps = worst_case_batches(attention.rule, attention.layout, budgets, most, *limits)
        for pages, batch, n in steps:
            beside = None
            if batch.prefills and attention.rule.sequential and n == 2:  # two tokens stand for all
                # for each token and head: its output, log-sum-exp and slots in use
                beside = query.new_empty(*query.shape[:2], self.head_size + 24 // query.itemsize)
            self.attend(query[:n], key[:n], value[:n], pages, batch, output[:n], gate_scores, pages)
            del beside


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
        shares, kept, longest = kv_cache_spec.shares, self.retention, vllm_config.model_config.max_model_len
        self.rows = DecodeRows(
            self.layout,
            kept,
            vllm_config.scheduler_config.max_num_seqs,
            kv_cache_spec.blocks(longest, 0, kv_cache_spec.max_budget),
            {} if shares is None else shares.counts,
            device,
            kv_cache_spec.longest_prefix(longest),
            kv_cache_spec.may_have_cartridges,
        )
        self.sized = False  # whether a row of the last step had a budget of its own
        self.may_protect = kv_cache_spec.prefix_cacheable
        if vllm_config.use_v2_model_runner:
            step_requests.apply_v2()

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> FixedBudgetMetadata | None:
        """Return the metadata of a step, or None for a dummy run of longer requests, whose outputs are 0.

        Runner V2 makes hundreds of such dummy runs before it serves.
        """
        common = common_attn_metadata
        split = Split.of(common.query_start_loc_cpu.tolist())
        lengths = common.seq_lens_cpu_upper_bound.tolist() if split.chunks or self.may_protect else []
        if any(lengths[i] == count and not common.is_prefilling[i] for i, _, count in split.chunks):
            return None  # a chunk that starts at position 0, yet past its prompt
        table, sizes = common.block_table_tensor, self._sizes_to_send(common)
        self.rows.fill(split.decodes, common.seq_lens, table, common.slot_mapping, self._sent(sizes))
        if (protected := sizes.protected) is not None:
            begun = [i for i in range(split.decodes) if 0 < protected[i] == lengths[i] - 1]
            self._begin_tails(begun, protected, sizes.made)
        step = split, lengths, table
        return self.finish(lambda regions, layer: self.rows.batch(*step, regions, layer, sizes), split.tokens)

    def _sizes_to_send(self, common) -> RequestSettings:
        """Return the sizes of a step's rows that differ from what the device has.

        Budgets and windows are given if this step or the previous one has requests with budgets of their own,
        because values of the previous step must be overwritten.

        Raises:
            RuntimeError: the model runner does not pass what requests asked for.
        """
        requests = common.num_reqs
        sizes = self.sizes(requests, dummy=not any(common.is_prefilling[:requests]))
        sized = any(own is not None for own in self.asked[:requests])
        send, self.sized = (self.sized or sized) and not self.unequal, sized
        return RequestSettings(
            sizes.protected if self.may_protect else None,
            sizes.budgets if send else None,
            sizes.windows if send else None,
            sizes.seeds,
            made=None if self.rows.made is None else sizes.made,
        )

    def _sent(self, sizes: RequestSettings) -> dict[str, torch.Tensor]:
        """Return the sizes as the tensors that :meth:`DecodeRows.fill` takes."""
        budgets = sizes.budgets and [[budget] * self.layout.num_kv_heads for budget in sizes.budgets]
        given = {"protected": sizes.protected, "budgets": budgets, "windows": sizes.windows, "seeds": sizes.seeds}
        given["made"] = sizes.made
        tensors = {
            name: torch.as_tensor(values, dtype=getattr(self.rows, name).dtype, device="cpu")
            for name, values in given.items()
            if values is not None
        }
        pinned = is_pin_memory_available()
        return {name: tensor.pin_memory() if pinned else tensor for name, tensor in tensors.items()}

    def _begin_tails(self, chosen: list[int], protected: list[int], made: list[int] | None) -> None:
        """Begin the tails of decode rows in all layers; a row of padding has null blocks.

        Args:
            chosen: indices of the rows.
            protected: tokens of the protected prefix of every row.
            made: slots of cartridges of every row, None without any.
        """
        if not chosen:
            return
        table, prefix_table = self.rows.beginning(chosen)
        tokens = torch.tensor([protected[i] for i in chosen], device="cpu")
        counts = made_of([made[i] for i in chosen] if made else [])
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            impl = layers[name].impl
            pages, regions, blocks = impl._bind(layers[name].kv_cache)
            if regions is None:
                rows = table.unsqueeze(1).expand(-1, impl.num_kv_heads, -1)
            else:
                _, rows = regions.place(impl.layer, table)
            prefix, attention = Prefix(blocks, prefix_table, tokens, counts), impl.attention
            ops.begin_tail(pages, rows, prefix, rule=attention.rule, impl=attention.impl)
