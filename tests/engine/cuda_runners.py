"""Both model runners of vLLM on a pretended GPU, without a model.

Their own code runs from a scheduler's output to the metadata of a step. Tensors are in CPU memory, and
Triton's interpreter runs the kernels.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engine.cuda_engine import LENGTH, cache_of
from vllm import SamplingParams
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import gpu_model_runner as v1
from vllm.v1.worker.gpu import block_table, cudagraph_utils
from vllm.v1.worker.gpu import model_runner as v2
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.utils import AttentionGroup

from kvpop_vllm.requests import RESOLVED

CPU = torch.device("cpu")


class _Built(Exception):
    """An exception that carries a step's metadata and stops the runner."""


def _ending(build):
    """Return ``build`` wrapped so that the runner stops after it."""

    def built(*args, **kwargs):
        raise _Built(build(*args, **kwargs))

    return built


@contextlib.contextmanager
def without_a_gpu():
    """Replace streams, events, ranks and pinned memory by stand-ins."""
    platform, nothing = type(current_platform), mock.MagicMock
    ranks = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1, ranks=[0])
    replaced = [
        (torch.accelerator, "synchronize", lambda: None), (torch, "Event", nothing), (torch.cuda, "Event", nothing), (torch.cuda, "Stream", nothing),
        (parallel_state, "_PP", ranks), (platform, "device_type", "cpu"),
        (topk_topp_sampler, "flashinfer_sampler_supported", lambda: False),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.object(platform, "get_global_graph_pool", nothing, create=True))
        yield


class Runner:
    """A model runner with one group of layers; every step has new requests.

    Attributes:
        runner: vLLM's model runner.
    """

    def __init__(self, config, group: AttentionGroup):
        self.config, self.group, self.names, self.steps = config, group, [], 0
        self.longest = 1 + config.num_speculative_tokens  # tokens of a request in a graph
        with without_a_gpu():
            self.runner = self.make()
        self.runner.kv_cache_config, self.runner.attn_groups = cache_of(group), [[group]]

    def graph_mode(self, v2: bool) -> CUDAGraphMode:
        backend = self.group.backend
        support = backend.get_builder_cls().get_cudagraph_support(self.config, None)
        resolve = self.config.compilation_config.resolve_cudagraph_mode_and_sizes
        return resolve(support, backend.__name__, self.longest, use_v2_model_runner=v2)

    def step(self, counts, lengths, rows, prompts=None, asks=None, drafts=None):
        """Return the metadata of a step, whose request i has the seed 100 + i.

        Args:
            counts: tokens of each request in this step.
            lengths: length of each request after this step.
            rows: blocks of each request.
            prompts: prompt tokens of each request, None if all tokens are prompt.
            asks: resolved cache options of each request, or None.
            drafts: drafts among the tokens of each request, or None.
        """
        output = SchedulerOutput.make_empty()
        output.finished_req_ids, self.steps = set(self.names), self.steps + 1
        self.names = [f"{self.steps}-{i}" for i in range(len(counts))]
        output.num_scheduled_tokens = dict(zip(self.names, counts, strict=True))
        output.total_num_scheduled_tokens = sum(counts)
        output.scheduled_spec_decode_tokens = {
            name: [1] * number for name, number in zip(self.names, drafts or (), strict=False) if number
        }
        asks = [{} if options is None else {RESOLVED: options} for options in asks or [None] * len(counts)]
        requests = zip(self.names, counts, lengths, rows, prompts or lengths, asks, strict=True)
        for i, (name, count, length, row, prompt, extra) in enumerate(requests):
            fields = {
                "mm_features": [],
                "pooling_params": None,
                "lora_request": None,
                "prefill_token_ids": [1] * max(length, prompt),
            }
            new = NewRequestData(
                name, [1] * prompt, sampling_params=SamplingParams(extra_args=extra, seed=100 + i), block_ids=(row,),
                num_computed_tokens=length - count, **fields,
            )  # fmt: skip
            output.scheduled_new_reqs.append(new)
        return self.built(lambda: self.runner.execute_model(output))

    def built(self, run):
        """Return the metadata that the builder makes of the step that ``run`` starts."""
        with without_a_gpu(), pytest.raises(_Built) as built:
            run()
        return built.value.args[0][self.group.layer_names[0]]


class RunnerV1(Runner):
    def make(self):
        runner = v1.GPUModelRunner(self.config, CPU)
        runner.cudagraph_dispatcher.initialize_cudagraph_keys(self.graph_mode(False), self.longest)
        runner.reorder_batch_threshold = self.group.get_metadata_builder().reorder_batch_threshold
        build = runner._build_attention_metadata
        runner._build_attention_metadata = _ending(lambda *args, **kwargs: build(*args, **kwargs)[0])
        return runner

    def dummy(self, rows, capture=False):
        """Run a dummy step of ``rows`` requests in a graph with the last step's block table."""
        options = {"uniform_decode": True, "is_graph_capturing": capture}
        return self.built(lambda: self.runner._dummy_run(rows * self.longest, CUDAGraphMode.FULL, **options))


class RunnerV2(Runner):
    def make(self):
        runner = v2.GPUModelRunner(self.config, CPU)
        runner.model_state = DefaultModelState(self.config, None, None, CPU)
        runner.model_state.prepare_attn = _ending(runner.model_state.prepare_attn)
        runner.sampler, runner.prompt_logprobs_worker, runner.decode_query_len = mock.Mock(), mock.Mock(), self.longest
        runner.cudagraph_manager = cudagraph_utils.CudaGraphManager(
            self.config, CPU, self.graph_mode(True), self.longest
        )
        runner.cudagraph_manager._graphs_captured = True
        spec = self.group.kv_cache_spec
        runner.block_tables = block_table.BlockTables(
            [spec.block_size], runner.max_num_reqs, runner.max_num_tokens,
            [spec.max_num_blocks_per_req(self.config, LENGTH)], CPU, slot_mapping_enabled=[spec.uses_slot_mapping],
        )  # fmt: skip
        return runner

    def dummy(self, rows, capture=False):
        """Run the same dummy step; V2 has a separate function for graph capture."""
        if capture:
            return self.recorded(rows, rows * self.longest, full=True)
        return self.built(lambda: self.runner._dummy_run(rows * self.longest, uniform_decode=True))

    def recorded(self, rows, tokens, full):
        """Return the metadata of a batch during capture of a full or piecewise graph."""
        runner = self.runner
        of_runner = runner.model_state, runner.input_buffers, runner.block_tables, runner.attn_groups
        shape = rows, tokens, *of_runner, runner.kv_cache_config, full
        return self.built(lambda: cudagraph_utils.prepare_inputs_to_capture(*shape))


RUNNERS = {"V1": RunnerV1, "V2": RunnerV2}
