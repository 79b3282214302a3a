"""Attention backend of engines with a policy, imported only by those."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from kvpop_vllm.attention.layer import FixedBudgetAttention
from kvpop_vllm.attention.shifted_scores import shift
from kvpop_vllm.cache.divided_heads import SharesByVotes
from kvpop_vllm.cache.pages import BLOCK_SLOTS, PageLayout, Pages
from kvpop_vllm.cache.ranks import Division, Shares, heads_of_rank, shards_of
from kvpop_vllm.cache.shares import EqualHeads, cached_region_shares
from kvpop_vllm.cache.step import StepBatch, StepPlan, plan_batch
from kvpop_vllm.compaction.cartridge import read_config
from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.kernels.draws import request_seed, signed
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.requests import RequestSlots, of_request
from kvpop_vllm.supported import DTYPES
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy, takes_snapshots

logger = init_logger("vllm.kvpop_vllm")


class FixedBudgetBackend(AttentionBackend):
    """Replacement of vLLM's CPU attention while a policy is on; :func:`for_config` binds it to one engine.

    For GPUs see :mod:`kvpop_vllm.vllm_glue.run.cuda_backend`.

    Attributes:
        late: True if a prompt that a step has ended is compressed at the beginning of the request's next one.
    """

    policy: ClassVar = None
    block_slots: ClassVar[int] = BLOCK_SLOTS
    drafts: ClassVar[int] = 0
    late: ClassVar[bool] = False
    stages: ClassVar[list[tuple[int, int]]] = []

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list] = [getattr(torch, name) for name in DTYPES["cpu"]]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name of the backend that this one replaces."""
        return "CPU_ATTN"

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        """Return the block sizes that the kernels take: multiples of 16."""
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls):
        """Return the cache layouts that the kernels take."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Return False: KV connectors are refused."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: the kernels have attention sinks in the softmax."""
        return True

    @staticmethod
    def get_impl_cls():
        """Return the implementation class."""
        return FixedBudgetImpl

    @staticmethod
    def get_builder_cls():
        """Return the metadata builder class."""
        return FixedBudgetMetadataBuilder

    @classmethod
    def customize_spec(cls, spec):
        """Return the cache spec of a layer with full attention.

        Raises:
            ConfigError: the layer is of another kind, or of another shape than the model's config says.
        """
        if type(spec).__name__ != "FullAttentionSpec":
            raise ConfigError(
                f"--kv-policy {cls.policy.settings.policy} cannot serve layers of kind {type(spec).__name__}: leave --kv-policy out"
            )
        model, ranks = cls.policy.model, get_tensor_model_parallel_world_size()
        expected, shape = (max(1, model.num_kv_heads // ranks), model.head_dim), (spec.num_kv_heads, spec.head_size)
        if shape != expected:
            raise ConfigError(
                f"--kv-policy {cls.policy.settings.policy} cannot serve a layer with {shape[0]} KV heads of size {shape[1]} where"
                f" the model's config says {expected[0]} of {expected[1]}: leave --kv-policy out"
            )
        layout = cls.layout(spec.num_kv_heads, spec.head_size, spec.dtype)
        return FixedBudgetSpec(
            block_size=1 if spec.block_size == 1 else layout.block_slots,  # vLLM asks for a slot's bytes with states
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            kv_dtype=spec.dtype,
            state_content_bytes=layout.slot_bytes,
            budget=cls.policy.retention.budget,
            sinks=cls.policy.retention.sinks,
            state_floats=layout.state_floats,
            drafts=layout.drafts,
            draft_query_bytes=layout.draft_query_bytes,
            rounds=cls.policy.round_length,
            shares=cls.division(),
            largest=tuple((largest.budget, largest.window) for largest in cls.policy.largest_retentions()),
            protect=cls.policy.protect,
            max_budget=cls.policy.max_budget,
            max_protect=cls.policy.max_protect,
            reserve=bool(cls.policy.settings.reserve),
            inspect=bool(cls.policy.settings.inspect),
            snapshots=takes_snapshots(cls.policy),
            draws=cls.policy.draws,
            compression=cls.policy.compression,
            late=cls.late,
            window=cls.policy.retention.window,
            max_window=cls.policy.max_window,
            cartridges=(room := cartridge_room(cls.policy))[0],
            loads=room[1],
            max_tp_shards=spec.max_tp_shards,
        )

    @classmethod
    def heads(cls, count: int) -> slice:
        """Return the KV heads of this rank, which holds ``count`` of them."""
        ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        return heads_of_rank(*ranks, cls.policy.model.num_kv_heads, count)

    @classmethod
    def division(cls) -> Division | None:
        """Return how heads divide the slots of a request, the same in all ranks; None if they are equal."""
        ranks = get_tensor_model_parallel_world_size()
        return cls.policy.division(shards_of(cls.stages, cls.policy.model.num_kv_heads, ranks))

    @classmethod
    def shard(cls) -> int:
        """Return the index of this rank among the shards of :meth:`division`."""
        stage = get_pp_group().rank_in_group if len(cls.stages) > 1 else 0
        return stage * get_tensor_model_parallel_world_size() + get_tensor_model_parallel_rank()

    @classmethod
    def shares(cls) -> Shares | None:
        """Return the budgets of this rank's heads for requests with the server's budget; None if all heads are equal."""
        division, retention = cls.division(), cls.policy.retention
        return None if division is None else division.shares(retention.budget, retention.window)[cls.shard()]

    @classmethod
    def layout(cls, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> PageLayout:
        """Return the page layout of one layer on this rank, before the slots per block are chosen for all groups of layers."""
        queries = cls.policy.draft_query_bytes(dtype) if cls.drafts else 0
        return PageLayout(num_kv_heads, head_size, dtype, cls.block_slots, cls.policy.state_floats, cls.drafts, queries)


def for_config(vllm_config, base: type[FixedBudgetBackend] = FixedBudgetBackend) -> type[FixedBudgetBackend]:
    """Return the backend class of one engine, with its policy, its slots per block and its number of drafts."""
    cache = vllm_config.cache_config
    slots = cache.block_size if cache.user_specified_block_size else BLOCK_SLOTS
    policy, stages = engine_policy(vllm_config), vllm_config.parallel_config.pipeline_parallel_size
    bounds = (get_pp_indices(policy.model.model_layers, stage, stages) for stage in range(stages))
    layers, drafts = policy.model.stages(bounds), vllm_config.num_speculative_tokens
    return type(base.__name__, (base,), {"policy": policy, "block_slots": slots, "drafts": drafts, "stages": layers})


def cartridge_room(policy) -> tuple[tuple[int, ...], bool]:
    """Return the slots of each cartridge with which an engine starts, and whether others may be loaded."""
    folders = (policy.settings.cartridge or {}).values()
    loads = bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING) and not policy.compresses
    return tuple(read_config(folder).slots for folder in folders), loads


def _log_kernels(like: torch.Tensor) -> None:
    """Log once which implementations run on tensors like this one, because the reference is slow."""
    for op, doing in (("decode_step", "decoding"), ("prefill_chunk", "prefilling")):
        chosen = dispatch.select(op, like)
        if chosen == "reference":
            lacking = "kvpop_vllm._C is not built, or has" if like.device.type == "cpu" else "Triton has"
            logger.warning_once("%s with the slow reference kernels: %s none for %s", doing, lacking, like.dtype)
        elif op == "decode_step":
            isa = f" ({dispatch.load_extension().current_isa()})" if chosen == "cpp" else ""
            logger.info_once("decoding with the %s kernels%s", chosen, isa)


@dataclass
class FixedBudgetMetadata:
    """Metadata of one engine step.

    With unequal shares the batch is rebuilt per layer, so that a CUDA graph records how the batch is built and not its
    values.

    Attributes:
        plan: plan of the step.
        num_tokens: tokens of the step.
    """

    plan: StepPlan
    num_tokens: int

    def batch(self, layer: int, shares: EqualHeads) -> StepBatch:
        """Return the batch of a layer whose heads share slots as ``shares`` says."""
        return self.plan.batch(shares, layer)


class FixedBudgetMetadataBuilder(AttentionMetadataBuilder[FixedBudgetMetadata]):
    """Metadata builder that has the runner put requests of one token and its drafts first, and splits the batch there."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.layout, self.policy = kv_cache_spec.layout, engine_policy(vllm_config)
        self.seed = request_seed(vllm_config.model_config.seed, 0)
        self.unequal = kv_cache_spec.shares is not None or self.policy.adaptive_head_budgets
        self.spec, self.records, compression = kv_cache_spec, {}, self.policy.compression
        self.after = compression and functools.lru_cache(maxsize=4096)(compression.after)
        self.padding = self._record(None, 0)
        self.requests: list[RequestSlots] | None = None  # slots of the step's requests, set before each build
        self.drafts: list[int] | None = None  # drafts of these requests, with speculative decoding

    def take_requests(self, params: list, prompts: list[int], drafts: list[int] | None = None) -> None:
        """Take the slots of the next step's requests. The record of a request is made in its first step.

        Args:
            params: sampling parameters of each request, or None.
            prompts: tokens of each prompt.
            drafts: drafts of each request, -1 for a chunk of a prompt; None without speculative decoding.
        """
        records, requests = {}, []
        for sampling, prompt in zip(params, prompts, strict=True):
            key = id(sampling), prompt  # the entry holds the parameters, so that no others have this id
            entry = records[key] = self.records.get(key) or (sampling, self._record(sampling, prompt))
            requests.append(entry[1])
        self.records, self.requests = records, requests
        self.drafts = None if drafts is None else [max(0, number) for number in drafts]

    def _record(self, sampling, prompt: int) -> RequestSlots:
        """Return the slots of a request, with the seed of its draws if there are any."""
        record = of_request(sampling, self.spec, prompt)
        if not self.policy.draws:
            return record
        seed = record.seed if record.seed is not None else getattr(sampling, "seed", None) or 0
        return record._replace(seed=signed(self.seed + signed(seed)))

    def slots(self, requests: int, dummy: bool = False) -> list[RequestSlots]:
        """Return the slots of the step's requests.

        Requests beyond those that the model runner has described are padding, which protects nothing.

        Args:
            requests: number of requests, padding included.
            dummy: True for a dummy run, which may come before the model runner has described anything.

        Raises:
            RuntimeError: the model runner does not pass what requests asked for.
        """
        if self.requests is None and not dummy:
            raise RuntimeError("this model runner does not say what requests ask for: leave --worker-cls out")
        described = (self.requests or [])[:requests]
        return described + [self.padding] * (requests - len(described))

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> FixedBudgetMetadata:
        """Return the metadata of a step from vLLM's common metadata."""
        common = common_attn_metadata
        starts, lengths = common.query_start_loc_cpu, common.seq_lens.tolist()
        counts = (starts[1:] - starts[:-1]).tolist()
        slots = self.slots(len(counts))
        after = self.after and [self.after(record) for record in slots]
        drafts = self.drafts and self.drafts + [0] * (len(counts) - len(self.drafts))
        plan = plan_batch(self.layout, slots, counts, lengths, common.block_table_tensor, after, drafts)
        return FixedBudgetMetadata(plan, int(starts[-1]))


class FixedBudgetImpl(AttentionImpl[FixedBudgetMetadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        sinks=None,
        **unsupported,
    ):
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.vllm_config = get_current_vllm_config()
        self.policy = engine_policy(self.vllm_config)
        longest = self.vllm_config.model_config.max_model_len
        refused = {
            "ALiBi": alibi_slopes is not None,
            "sliding-window layers of its own": sliding_window is not None and sliding_window < longest,
            "logit soft-capping": bool(logits_soft_cap),
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "cross-layer KV sharing": kv_sharing_target_layer_name is not None,
            f"a {kv_cache_dtype} KV cache": kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            **{f"the attention option {name}": value is not None for name, value in unsupported.items()},
        }
        if reasons := [feature for feature, present in refused.items() if present]:
            raise ConfigError(
                f"--kv-policy {self.policy.settings.policy} cannot serve a model with {', '.join(reasons)}: leave --kv-policy out"
            )
        self.sinks = sinks
        self.cartridges = cartridge_room(self.policy)
        self.attention: FixedBudgetAttention | None = None
        self.layer, self.shares, self.division, self.shard = None, None, None, 0
        self.gates: torch.nn.ModuleList | None = None
        self._bound: tuple[weakref.ref, tuple[Pages, EqualHeads, Pages]] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Build the layer's rule; a scorer's tensors have been loaded by then.

        Raises:
            RuntimeError: the rule has other slot roles than the policy's retention.
        """
        context = self.vllm_config.compilation_config.static_forward_context
        name = next(n for n, layer in context.items() if getattr(layer, "impl", None) is self)
        context[name].sliding_window = None  # no request exceeds it, and vLLM asks for a cache spec by it
        backend = for_config(self.vllm_config)
        heads = backend.heads(self.num_kv_heads)
        self.layer, self.shares = self.policy.model.ordinal(extract_layer_index(name)), backend.shares()
        self.division, self.shard = backend.division(), backend.shard()
        if self.policy.gated:
            self._add_gate(self.layer, heads)
        rule = self.policy.layer_rule(self.layer, heads)
        retention = self.policy.retention
        if (rule.sinks, rule.window) != (retention.sinks, retention.window):
            raise RuntimeError(f"{type(self.policy).__name__}.rule() has other roles than the policy's retention")
        layout = backend.layout(self.num_kv_heads, self.head_size, act_dtype)
        device = self.vllm_config.device_config.device_type
        rule = rule.to(device)
        if self.attention is not None and self.attention.layout == layout:  # weights are loaded again
            _copy_tensors(rule, self.attention.rule)
            if self.sinks is not None:
                self.attention.sink_logits.copy_(self.sinks)
            return
        sink_logits = None if self.sinks is None else self.sinks.detach().to(device, torch.float32, copy=True)
        self.attention = FixedBudgetAttention(layout, rule, self.scale, sink_logits=sink_logits)
        _log_kernels(torch.empty(0, self.head_size, dtype=act_dtype, device=device))

    def _add_gate(self, layer: int, heads: slice) -> None:
        """Add the layer's gate.

        Raises:
            ConfigError: no module around the layer hands over what a gate reads.
        """
        if self.gates is None:
            raise ConfigError(
                f"--kv-policy {self.policy.name} reads hidden states, which the modules around this model's attention layers do not take:"
                " choose another policy"
            )
        gate = self.policy.gate(layer, heads).to(self.vllm_config.device_config.device_type)
        if len(self.gates):  # weights are loaded again
            self.gates[0].load_state_dict(gate.state_dict())
        else:
            self.gates.append(gate)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales, gate_scores=None, **more):
        """Write the layer's attention to ``output`` and return it.

        Args:
            layer: vLLM's attention layer, unused.
            query: ``[T, Hq, D]``.
            key: ``[T, H, D]``.
            value: ``[T, H, D]``.
            kv_cache: ``[blocks, H, N, C]`` uint8.
            attn_metadata: metadata of the step, None in a profiling run.
            output: ``[T, Hq, D]``.
            scales: unused.
            gate_scores: ``[T, H]`` float32, gate scores of a policy with a gate, else None.
            more: unused.
        """
        if attn_metadata is None:  # profiling run
            return output.fill_(0)
        n = attn_metadata.num_tokens
        pages, shares, blocks = self._bind(kv_cache)
        batch = attn_metadata.batch(self.layer, shares)
        tokens = query, key, value, output
        q, k, v, out = tokens if n == query.shape[0] else (x[:n] for x in tokens)
        self.attend(q, k, v, pages, batch, out, gate_scores, blocks)
        return output

    def attend(self, q, k, v, pages: Pages, batch: StepBatch, out, gate_scores, blocks: Pages) -> None:
        """Run one step.

        Args:
            q: ``[n, Hq, D]``, for the n tokens of the step.
            k: ``[n, H, D]``.
            v: ``[n, H, D]``.
            pages: the layer's pages, by block or by region.
            batch: the step's batch.
            out: ``[n, Hq, D]``, overwritten.
            gate_scores: ``[T, H]`` float32 gate scores with T >= n, or None.
            blocks: the layer's pages by block.
        """
        gate_scores = None if gate_scores is None else gate_scores[: len(q)]
        if self.policy.shifted:
            gate_scores = shift(gate_scores, pages, batch, self.attention.rule.sinks)
        self.attention.forward(q, k, v, pages, batch, out, gate_scores, blocks)

    def _bind(self, kv_cache: torch.Tensor) -> tuple[Pages, EqualHeads, Pages]:
        """Return typed views of this layer's cache, made once per cache and forgotten with it.

        vLLM allocates a cache to measure CUDA graphs, and frees it before it allocates the real one.

        Returns:
            The pages, by region if heads have unequal shares; how heads share slots; the layer's own pages by block.
        """
        if self._bound is None or self._bound[0]() is not kv_cache:
            self._bound = weakref.ref(kv_cache, self._forget), self._view(kv_cache)
        return self._bound[1]

    def _forget(self, cache: weakref.ref) -> None:
        """Drop the views of a cache that vLLM has dropped, and with them its memory."""
        if self._bound is not None and self._bound[0] is cache:
            self._bound = None

    def _view(self, kv_cache: torch.Tensor) -> tuple[Pages, EqualHeads, Pages]:
        """View the storage of the cache; the tensor itself is freed when vLLM drops it."""
        layout, blocks = dataclasses.replace(self.attention.layout, block_slots=kv_cache.shape[2]), kv_cache.shape[0]
        place = kv_cache.storage_offset(), kv_cache.shape, kv_cache.stride()
        layer_pages = layout.view(kv_cache.new_empty(0).set_(kv_cache.untyped_storage(), *place))
        if self.policy.adaptive_head_budgets:
            divided = SharesByVotes(layer_pages, self.attention.rule.compression, self.policy.retention.budget)
            return divided.pages, divided, layer_pages
        if self.shares is None:
            return layer_pages, EqualHeads(layout.num_kv_heads), layer_pages
        shares = cached_region_shares(self.shares, layout, blocks, kv_cache.device, self.division, self.shard)
        return shares.view(_all_layers(kv_cache, self.layer - self.shares.first)), shares, layer_pages


def _copy_tensors(source: RetentionRule, target: RetentionRule) -> None:
    """Copy a rule's and its scorer's tensors into those of an equal rule, which CUDA graphs have recorded."""
    target.log_gamma.copy_(source.log_gamma)
    for name, tensor in vars(target.scorer).items():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(getattr(source.scorer, name))


def _all_layers(kv_cache: torch.Tensor, layer: int) -> torch.Tensor:
    """Return the allocation that holds the caches of all layers of this stage, one after another.

    Args:
        kv_cache: the cache of layer ``layer``.
        layer: index of the layer in its stage.

    Raises:
        RuntimeError: the caches do not lie one after another.
    """
    offset = kv_cache.storage_offset()
    if not kv_cache.is_contiguous() or offset != layer * kv_cache.nbytes:
        raise RuntimeError(
            f"layer {layer}'s cache starts at byte {offset}: unequal shares need the layers one after another"
        )
    return torch.empty(0, dtype=torch.uint8, device=kv_cache.device).set_(kv_cache.untyped_storage())
