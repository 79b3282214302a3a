"""Parts of an engine on a GPU that is not there: configs, a metadata builder, and what both model runners hand to it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from kvpop_vllm.vllm_glue import backend as glue

HEADS, SIZE, SLOTS, LENGTH, MOST = 2, 32, 16, 512, 4
STREAMING = {"policy": "streaming-llm", "budget": 64, "sinks": 2, "window": 16}


def configure(model, policy=STREAMING, **options):
    """The config of an engine as ``vllm serve`` makes it."""
    additional = {} if policy is None else {"kv_policy": policy}
    sizes = {"max_model_len": LENGTH, "max_num_seqs": MOST, "block_size": SLOTS}
    args = EngineArgs(str(model), skip_tokenizer_init=True, additional_config=additional, **(sizes | options))
    return args.create_engine_config()


@contextmanager
def rank(config, index: int = 0, ranks: int = 1):
    """Inside one tensor-parallel rank of an engine."""
    there = {"get_tensor_model_parallel_rank": index, "get_tensor_model_parallel_world_size": ranks}
    with set_current_vllm_config(config), mock.patch.multiple(glue, **{k: lambda v=v: v for k, v in there.items()}):
        yield


def chosen(config, size=SIZE, dtype=torch.float32, **options):
    """The backend that vLLM chooses for a layer."""
    with set_current_vllm_config(config):
        return get_attn_backend(size, dtype, None, **options)


def group_of(config, heads=HEADS, device="cpu", index=0, ranks=1) -> AttentionGroup:
    """The layers' attention group with its metadata builder, as a runner makes it."""
    with rank(config, index, ranks):
        backend = chosen(config)
        plain = FullAttentionSpec(block_size=SLOTS, num_kv_heads=heads, head_size=SIZE, dtype=torch.float32)
        group = AttentionGroup(backend, ["model.layers.0.self_attn.attn"], backend.customize_spec(plain), 0)
        group.create_metadata_builders(config, torch.device(device), group.kv_cache_spec.block_size)
    return group


class Inputs:
    """The tensors of a runner that stay where they are, for at most :data:`MOST` requests.

    Attributes:
        lengths: ``[MOST]`` int32. starts: ``[MOST + 1]`` int32. table: ``[MOST, W]`` int32. slots: ``[tokens]`` int64.
    """

    def __init__(self, config):
        self.config, tokens = config, 256
        self.lengths = torch.zeros(MOST, dtype=torch.int32)
        self.starts = torch.zeros(MOST + 1, dtype=torch.int32)
        self.table = torch.zeros(MOST, LENGTH // SLOTS, dtype=torch.int32)
        self.slots = torch.full((tokens,), -1, dtype=torch.int64)

    def set(self, counts, lengths, rows, real=True) -> None:
        """A step of requests with ``counts`` tokens that make them ``lengths`` long; rows: their blocks. A dummy run is not real."""
        n, total = len(counts), sum(counts)
        self.lengths.zero_()
        self.lengths[:n] = torch.tensor(lengths)
        self.starts[1 : n + 1] = torch.tensor(counts).cumsum(0)
        self.starts[n + 1 :] = total
        for row, blocks in zip(self.table, rows, strict=False):
            row[: len(blocks)] = torch.tensor(blocks)
        self.slots.fill_(-1)
        self.real = real
        if real:
            self.slots[:total] = torch.arange(1000, 1000 + total)

    def groups(self, group, blocks=100):
        """The cache of one group, as the engine core sees it."""
        spec = KVCacheGroupSpec(group.layer_names, group.kv_cache_spec)
        return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[spec])


def runner_v1(inputs: Inputs, group: AttentionGroup, prompts=None):
    """``(counts, padded, capture) -> metadata`` of runner V1's own code; prompts ``[MOST]``."""
    upper = torch.zeros(MOST, dtype=torch.int32)
    table = SimpleNamespace(get_device_tensor=lambda n: inputs.table[:n])
    known = torch.ones(MOST, dtype=torch.int32) if prompts is None else prompts
    batch = SimpleNamespace(
        block_table=[table],
        num_computed_tokens_cpu_tensor=torch.zeros(MOST, dtype=torch.int32),
        num_prompt_tokens_cpu_tensor=known,
    )
    config = inputs.config
    fake = SimpleNamespace(
        kv_cache_config=inputs.groups(group), attn_groups=[[group]], input_batch=batch, device=torch.device("cpu"),
        max_model_len=LENGTH, optimistic_seq_lens_cpu=upper, seq_lens=inputs.lengths, is_mm_prefix_lm=False,
        model_config=config.model_config, cache_config=config.cache_config, dcp_world_size=1, speculative_config=None,
        query_start_loc=SimpleNamespace(gpu=inputs.starts, cpu=inputs.starts), positions=torch.zeros(256, dtype=torch.int64),
        _get_encoder_seq_lens=lambda *a, **k: (None, None), _attn_group_iterator=lambda: iter([group]),
    )  # fmt: skip

    def build(counts, padded=None, capture=False):
        upper.copy_(inputs.lengths)
        n, more = len(counts), {} if padded is None else {"num_tokens_padded": padded, "num_reqs_padded": padded}
        found, _ = GPUModelRunner._build_attention_metadata(
            fake, num_tokens=sum(counts), num_reqs=n, max_query_len=max(counts), for_cudagraph_capture=capture,
            slot_mappings={0: inputs.slots}, **more,
        )  # fmt: skip
        return found[group.layer_names[0]]

    return build


def runner_v2(inputs: Inputs, group: AttentionGroup, prompts=None):
    """The same of runner V2's: its model state builds the metadata, of batches that its runner pads."""
    buffers = InputBuffers(MOST, 256, torch.device("cpu"))
    buffers.seq_lens, buffers.query_start_loc = inputs.lengths, inputs.starts
    state = SimpleNamespace(
        supports_mm_inputs=False, encoder_cache=None, model_config=inputs.config.model_config, max_model_len=LENGTH
    )

    def build(counts, padded=None, capture=False):
        n, kept = len(counts), (inputs.lengths.clone(), inputs.starts.clone())
        batch = InputBatch.make_dummy(n, sum(counts), buffers)
        inputs.lengths.copy_(kept[0]), inputs.starts.copy_(kept[1])
        batch.num_reqs_after_padding = batch.num_tokens_after_padding = padded or n
        batch.num_tokens_after_padding = padded or sum(counts)
        batch.query_start_loc_np = inputs.starts.numpy()
        batch.num_scheduled_tokens = np.array(counts, dtype=np.int32)
        batch.query_start_loc, batch.seq_lens = inputs.starts, inputs.lengths[: padded or n]
        batch.seq_lens_cpu_upper_bound = inputs.lengths[: padded or n].clone()
        if inputs.real:
            batch.is_prefilling_np = np.array([count > 1 for count in counts])
        mode = CUDAGraphMode.FULL if padded else CUDAGraphMode.NONE
        if prompts is not None:
            _prepare(batch, group, prompts)
        found = DefaultModelState.prepare_attn(
            state, batch, mode, (inputs.table[: padded or n],), inputs.slots.unsqueeze(0), [[group]], inputs.groups(group),
            for_capture=capture,
        )  # fmt: skip
        return found[group.layer_names[0]]

    return build


def _prepare(batch, group, prompts) -> None:
    """What runner V2 does first; the requests lie in its state in another order than in the batch."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

    batch.idx_mapping_np = np.arange(batch.num_reqs)[::-1].copy()
    held = prompts.numpy().astype(np.int32).copy()
    held[: batch.num_reqs] = held[: batch.num_reqs][::-1]
    fake = SimpleNamespace(
        req_states=SimpleNamespace(prompt_len=SimpleNamespace(np=held)),
        attn_groups=[[group]],
        pcp_manager=SimpleNamespace(prepare_attn=lambda batch: "both"),
    )
    assert RunnerV2.prepare_attn(fake, batch) == "both"


RUNNERS = {"V1": runner_v1, "V2": runner_v2}
