"""What vLLM's own classes make of the backend for GPUs: in a process that they take for one with a GPU (cuda_platform.py), where
nothing but the device itself is missing. What the kernels then do is in test_cuda_interpreted.py, run in the same process."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

PRETENDED = os.environ.get("KVPOP_PRETEND_CUDA") == "1"
ROOT = Path(__file__).parents[2]

if PRETENDED:
    from engine.cuda_engine import (
        LENGTH,
        MOST,
        RUNNERS,
        SLOTS,
        STREAMING,
        Inputs,
        chosen,
        configure,
        group_of,
        runner_v1,
    )  # fmt: skip
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
else:
    RUNNERS = {}

    def test_in_a_process_with_a_gpu_that_is_not_there():
        """Runs what is below, and the interpreted kernels."""
        files = [__file__, str(Path(__file__).with_name("test_cuda_interpreted.py"))]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "engine.cuda_platform",
            *files,
        ]
        paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"KVPOP_PRETEND_CUDA": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
        outcome = subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
        assert int(re.search(r"(\d+) passed", outcome.stdout)[1]) > 40


class Pretended:
    __test__ = PRETENDED


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def scorers(model, tmp_path_factory):
    """``kind -> folder``."""
    root = tmp_path_factory.mktemp("scorers")
    shape = {"sinks": 2, "window": 6, "topk": 32}
    return {kind: str(write_random_scorer(root / kind, model, kind, **shape)) for kind in ("mlstm", "trimkv")}


def refusal(model, policy, **options):
    with pytest.raises(ConfigError) as caught:
        configure(model, policy, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestChoice(Pretended):
    def test_an_engine_with_a_policy_asks_for_custom(self, model):
        config, stock = configure(model), configure(model, None)
        assert config.device_config.device_type == stock.device_config.device_type == "cuda"
        assert config.attention_config.backend is AttentionBackendEnum.CUSTOM and stock.attention_config.backend is None
        assert pickle.loads(pickle.dumps(config.attention_config)).backend is AttentionBackendEnum.CUSTOM

    def test_vllm_chooses_it_by_its_own_path(self, model):
        """Twice in a process, each engine gets its own; a stock one none of ours."""
        first, second = configure(model), configure(model, STREAMING | {"budget": 96})
        assert [chosen(c).policy.retention.budget for c in (first, second, first)] == [64, 96, 64]
        backend = chosen(first)
        assert backend.get_name() in AttentionBackendEnum.__members__ and backend.block_slots == SLOTS
        for dtype in (torch.float16, torch.bfloat16):
            assert chosen(first, dtype=dtype).get_name() == "CUSTOM"
        try:
            assert chosen(configure(model, None), dtype=torch.bfloat16).__module__.startswith("vllm.")
        except ValueError as error:
            assert "No valid attention backend found" in str(error)  # none of vllm's own in this build

    @pytest.mark.parametrize(
        "named, options",
        [
            ("head sizes are 32, 64, 80, 96, 128", {"size": 48}),
            ("--dtype is float16, bfloat16 or float32", {"dtype": torch.float64}),
            ("leave --kv-policy out", {"has_sink": True}),
            ("leave --kv-policy out", {"use_mla": True}),
            ("leave --kv-policy out", {"attn_type": "encoder_only"}),
            ("leave --kv-policy out", {"has_sliding_window": True}),
        ],
    )
    def test_what_a_layer_cannot_have(self, model, named, options):
        with pytest.raises(ValueError, match="CUSTOM is not valid") as caught:
            chosen(configure(model), **options)
        assert named in str(caught.value) and "\n" not in str(caught.value)

    def test_layouts_and_block_sizes(self, model):
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
        from vllm.v1.worker.utils import select_common_block_size

        backend = chosen(configure(model))
        assert [layout.name for layout in get_supported_kv_cache_layouts([backend])] == ["LBHNC"]
        group = group_of(configure(model))
        assert select_common_block_size(SLOTS, [backend], [group.kv_cache_spec]) == SLOTS
        assert group.kv_cache_spec.uses_slot_mapping, "rows of padding are told by it"

    def test_custom_without_a_policy(self, model, monkeypatch):
        """Ours says so; where another plugin had registered one before, that one serves."""
        from kvpop_vllm.vllm_glue import select

        stock = configure(model, None, attention_backend="CUSTOM")
        with pytest.raises(ValueError, match="for engines with --kv-policy"):
            chosen(stock)
        theirs = "vllm.v1.attention.backends.flex_attention.FlexAttentionBackend"
        monkeypatch.setattr(select, "custom_before", theirs)
        assert chosen(stock).__name__ == "FlexAttentionBackend"

    def test_registering_keeps_what_was_there(self, monkeypatch):
        from kvpop_vllm.vllm_glue import cuda, plugin, select

        monkeypatch.setattr(select, "custom_before", None)
        try:
            register_backend(AttentionBackendEnum.CUSTOM, "other.Backend")
            plugin.register()
            plugin.register()
            assert (select.custom_before, AttentionBackendEnum.CUSTOM.get_path()) == ("other.Backend", cuda.BACKEND)
        finally:
            register_backend(AttentionBackendEnum.CUSTOM, cuda.BACKEND)

    def test_a_plugin_that_takes_custom_afterwards(self, model):
        from kvpop_vllm.vllm_glue import cuda

        try:
            register_backend(AttentionBackendEnum.CUSTOM, "other.Backend")
            assert "(other.Backend): set VLLM_PLUGINS=kvpop" in refusal(model, STREAMING)
        finally:
            register_backend(AttentionBackendEnum.CUSTOM, cuda.BACKEND)


class TestRefusals(Pretended):
    @pytest.mark.parametrize(
        "named, policy, options",
        [
            ("--kv-allocator ada", {"policy": "snapkv", "allocator": "ada"}, {}),
            ("choose uniform or pyramid, or another policy", {"policy": "adakv"}, {}),
            ("leave --attention-backend out", {}, {"attention_backend": "FLASH_ATTN"}),
            ("leave --worker-cls out", {"policy": "snapkv"}, {"worker_cls": "other.Worker"}),
            ("--speculative-config", {}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
            ("--block-size 8", {}, {"block_size": 8}),
        ],
    )
    def test_one_line_at_start(self, model, named, policy, options):
        settings = STREAMING | policy if policy.get("policy") is None else {"budget": 96} | policy
        assert named in refusal(model, settings, **options)

    def test_without_triton(self, model, monkeypatch):
        import importlib.util

        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else find(name, *a))
        assert "install the package triton" in refusal(model, STREAMING)

    @pytest.mark.parametrize("op", ["decode_step", "prefill_chunk"])
    def test_without_kernels(self, model, monkeypatch, op):
        from kvpop_vllm.kernels import dispatch

        monkeypatch.setitem(dispatch.TRITON_LARGEST_HEAD, op, 16)
        assert f"({op} of bfloat16 heads of 32): serve on a CPU" in refusal(model, STREAMING)
        monkeypatch.delitem(dispatch.TRITON_LARGEST_HEAD, op)
        monkeypatch.delitem(dispatch.TRITON_DTYPES, op)
        assert op in refusal(model, STREAMING)

    def test_batch_invariance(self, model, monkeypatch):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert "unset VLLM_BATCH_INVARIANT" in refusal(model, STREAMING)

    def test_amd(self, model, monkeypatch):
        from vllm.platforms import current_platform

        monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
        assert "the rocm platform yet" in refusal(model, STREAMING)

    def test_what_a_cpu_refuses_and_a_gpu_does_not(self, model):
        assert configure(model, dtype="float16").model_config.dtype == torch.float16
        for policy in ("h2o", "snapkv", "pyramidkv", "momentkv"):
            configure(model, {"policy": policy, "budget": 128})


class TestGraphs(Pretended):
    def support(self, config):
        backend = chosen(config)
        return backend.get_builder_cls().get_cudagraph_support(config, None), backend.__name__

    def resolved(self, config, v2=False):
        """The mode as either runner resolves it."""
        return config.compilation_config.resolve_cudagraph_mode_and_sizes(
            *self.support(config), 1, use_v2_model_runner=v2
        )

    def test_single_tokens_are_what_is_declared(self, model):
        """Graphs of several tokens a request, which nothing asks for without speculative decoding, are not."""
        assert self.support(configure(model))[0].name == "UNIFORM_SINGLE_TOKEN_DECODE"

    @pytest.mark.parametrize("v2", [False, True])
    @pytest.mark.parametrize(
        "asked, becomes",
        [
            (None, "FULL_AND_PIECEWISE"),
            ("FULL", "FULL_AND_PIECEWISE"),
            ("FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
            ("PIECEWISE", "PIECEWISE"),
        ],
    )
    def test_full_graphs_hold_no_mixed_batch(self, model, asked, becomes, v2):
        config = configure(model, **({"compilation_config": {"cudagraph_mode": asked}} if asked else {}))
        mode = self.resolved(config, v2)
        assert mode.name == becomes and mode.mixed_mode() is not CUDAGraphMode.FULL

    def test_runner_v1_replays_them_for_decodes_alone(self, model):
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        config = configure(model)
        dispatcher = CudagraphDispatcher(config)
        dispatcher.initialize_cudagraph_keys(self.resolved(config), 1)
        for counts, mode, reqs in (
            ([1, 1, 1], "FULL", MOST), ([1], "FULL", 1), ([1, 1, 5], "PIECEWISE", None), ([3], "PIECEWISE", None),
        ):  # fmt: skip
            uniform = GPUModelRunner._is_uniform_decode(max(counts), 1, sum(counts), len(counts))
            found, desc = dispatcher.dispatch(sum(counts), uniform_decode=uniform)
            assert (found.name, desc.num_reqs) == (mode, reqs)
        assert all(
            d.uniform and d.num_reqs == d.num_tokens <= MOST for d in dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
        )

    def test_runner_v2_replays_them_for_decodes_alone(self, model, monkeypatch):
        from vllm.v1.worker.gpu import cudagraph_utils, model_runner

        ranks = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: ranks)
        monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, raising=False)
        config = configure(model)
        manager = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), self.resolved(config, True), 1)
        manager._graphs_captured = True
        uniform = model_runner.get_uniform_decode_token_count
        for counts, prefill, mode in (
            ([1, 1, 1], False, "FULL"), ([1], False, "FULL"), ([1, 1, 5], True, "PIECEWISE"), ([3], True, "PIECEWISE"),
            ([1, 1], True, "PIECEWISE"),
        ):  # fmt: skip
            count = uniform(len(counts), sum(counts), max(counts), not prefill)
            found = manager.dispatch(len(counts), sum(counts), count, 0)
            assert found.cg_mode.name == mode
            if mode == "FULL":
                assert found.num_reqs == found.num_tokens and found.uniform_token_count == 1

    def test_gates_end_a_piece_of_the_compiled_graph(self, model, scorers):
        """The op that hands a gate's scores to attention is no part of a piecewise CUDA graph."""
        from vllm.compilation.partition_rules import should_split

        from kvpop_vllm.vllm_glue import gated_attention

        op = gated_attention.torch.ops.kvpop_vllm.attention_with_given.default
        node = SimpleNamespace(op="call_function", target=op)
        gated = configure(model, {"policy": "trimkv", "scorer": scorers["trimkv"]}).compilation_config
        assert should_split(node, gated.splitting_ops) and gated.splitting_ops_contain_attention()
        for other in (configure(model), configure(model, None)):
            assert not should_split(node, other.compilation_config.splitting_ops)


ROWS = [[11, 12, 13], [21], [31, 32, 33, 34]]


class TestRunners(Pretended):
    @pytest.fixture(params=RUNNERS)
    def runner(self, request):
        return RUNNERS[request.param]

    def test_decodes_padded_to_a_captured_batch(self, model, runner):
        config = configure(model)
        inputs, group = Inputs(config), group_of(config)
        build = runner(inputs, group)
        inputs.set([1, 1, 1], [33, 5, 64], ROWS)
        found = build([1, 1, 1], padded=MOST)
        batch = found.batch(0, None)
        assert (found.num_tokens, batch.decodes, batch.tokens, batch.prefills) == (MOST, MOST, slice(0, MOST), ())
        assert batch.positions.tolist() == [32, 4, 63, -1] and batch.valid[:, 0].tolist() == [32, 4, 63, 0]
        assert batch.table[:, 0].tolist() == [[11, 12, 13, 0], [21, 0, 0, 0], [31, 32, 33, 34], [0] * 4]
        assert batch.table.shape == (MOST, 2, 4) and batch.budgets.tolist() == [64, 64]

    def test_addresses_stay(self, model, runner):
        config = configure(model)
        inputs, group = Inputs(config), group_of(config)
        build, names = runner(inputs, group), ("table", "positions", "valid", "budgets")
        seen = set()
        for step in range(3):
            inputs.set([1] * (step + 1), [40 + step] * (step + 1), ROWS)
            batch = build([1] * (step + 1), padded=MOST).batch(0, None)
            seen.add(tuple(getattr(batch, name).data_ptr() for name in names))
            assert batch.positions.tolist() == [39 + step] * (step + 1) + [-1] * (MOST - step - 1)
        assert len(seen) == 1

    @pytest.mark.parametrize("capture", [False, True])
    def test_dummy_runs_are_padding(self, model, runner, capture):
        """Also where rows of the block table are those of live requests, as in a dummy run of runner V1."""
        config = configure(model)
        inputs, group = Inputs(config), group_of(config)
        inputs.set([1] * MOST, [1] * MOST, [*ROWS, [41]], real=False)
        batch = runner(inputs, group)([1] * MOST, padded=MOST, capture=capture).batch(0, None)
        assert batch.positions.tolist() == [-1] * MOST and (batch.table == 0).all()

    def test_dummy_runs_of_longer_requests_are_left_out(self, model):
        """Runner V2 makes one before and one in every piecewise graph; a prompt's first chunk is none."""
        config = configure(model)
        inputs, group = Inputs(config), group_of(config)
        inputs.set([1, 2, 2], [1, 2, 2], [[0], [0], [0]], real=False)
        assert RUNNERS["V2"](inputs, group)([1, 2, 2]) is None
        for runner in RUNNERS.values():
            inputs.set([1, 2, 2], [1, 2, 2], ROWS)
            assert len(runner(inputs, group)([1, 2, 2]).batch(0, None).prefills) == 2

    def test_decodes_and_chunks(self, model, runner):
        config = configure(model)
        inputs, group = Inputs(config), group_of(config)
        inputs.set([1, 30, 7], [33, 30, 71], ROWS)
        found = runner(inputs, group)([1, 30, 7])
        batch = found.batch(0, None)
        assert (found.num_tokens, batch.decodes, batch.positions.tolist()) == (38, 1, [32])
        assert [(c.first, c.last, c.start) for c in batch.prefills] == [(1, 31, 0), (31, 38, 64)]
        assert [c.row[:, 0].tolist() for c in batch.prefills] == [[21, 21], [31, 31]]

    def test_lengths_of_prompts(self, model, runner):
        config = configure(model, {"policy": "snapkv", "budget": 96})
        config.__dict__.pop("use_v2_model_runner", None)
        inputs, group = Inputs(config), group_of(config)
        if runner is not runner_v1:
            from kvpop_vllm.vllm_glue import prompt_lengths

            prompt_lengths.apply_v2()
        prompts = torch.tensor([20, 5, 90, 7], dtype=torch.int32)
        inputs.set([1, 1, 40], [33, 5, 64], ROWS)
        build = runner(inputs, group, prompts)
        batch = build([1, 1, 40]).batch(0, None)
        assert batch.prompts.tolist() == [20, 5] and [c.prompt for c in batch.prefills] == [90]
        inputs.set([1, 1], [34, 6], ROWS)
        assert build([1, 1], padded=MOST).batch(0, None).prompts.tolist() == [20, 5, 1, 1]

    def test_runner_v2_says_prompts_before_it_builds(self):
        """And both runners by the methods that are wrapped."""
        import inspect

        from engine.stock_run import functions_of_ours_in_vllm
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1

        from kvpop_vllm.vllm_glue import prompt_lengths
        from kvpop_vllm.vllm_glue.patches import LEDGER

        prompt_lengths.apply_v2()

        source = inspect.getsource(V2.execute_model)
        assert 0 < source.index("self.prepare_attn(") < source.index("self.model_state.prepare_attn(")
        assert "self._build_attention_metadata(" in inspect.getsource(V1.execute_model)
        (target,) = [patch.target for patch in LEDGER if patch.on_gpus]
        assert target == prompt_lengths.RUNNER_V2 and target in functions_of_ours_in_vllm()

    def test_heads_of_ranks(self, model):
        """Two KV heads on one, two and four ranks: the layout of a rank is that of the heads it holds."""
        config = configure(model)
        for ranks, held in ((1, 2), (2, 1), (4, 1)):
            for index in range(ranks):
                builder = group_of(config, held, index=index, ranks=ranks).get_metadata_builder()
                assert builder.layout.num_kv_heads == held and builder.rows.budgets.shape == (held,)

    def test_no_value_is_asked_for(self, model, runner):
        """On the device "meta" tensors have none, and may not meet those of the CPU."""
        from attention.test_device_step import NoWaiting

        for policy in (STREAMING, {"policy": "snapkv", "budget": 96}):
            config = configure(model, policy)
            inputs, group = Inputs(config), group_of(config, device="meta")
            on_cpu = inputs.starts
            for counts, padded in (([1, 1, 1], MOST), ([1, 30, 7], None)):
                inputs.set(counts, [64] * 3, ROWS)
                common = common_of(inputs, on_cpu, counts, padded)
                with NoWaiting():
                    batch = group.get_metadata_builder().build(0, common).batch(0, None)
                assert batch.positions.device.type == "meta"


class TestAsyncScheduling(Pretended):
    def test_a_recycled_block_is_started_anew_by_a_later_step(self, model):
        """A request that ends while its next step is on the way: its blocks go to another at once, in a step after that one.

        vLLM holds them back for KV connectors alone. On one stream the later step runs later, and begins at position 0, where
        kernels take a page for empty whatever it holds.
        """
        from vllm import SamplingParams
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager

        config = configure(model)
        group, config.cache_config.num_gpu_blocks = group_of(config), 3
        assert (
            config.scheduler_config.async_scheduling and config.scheduler_config.get_scheduler_cls() is AsyncScheduler
        )
        pool = Inputs(config).groups(group, blocks=3)
        scheduler = AsyncScheduler(config, pool, StructuredOutputManager(config), SLOTS)
        assert not scheduler.defer_block_free

        def sampled(step, token):
            names = list(step.num_scheduled_tokens)
            return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [[token] for _ in names])

        asked = SamplingParams(max_tokens=9, stop_token_ids=[7])
        for name in "ab":
            scheduler.add_request(Request(name, [1] * 20, asked, None))
        first, second = scheduler.schedule(), scheduler.schedule()
        assert first.num_scheduled_tokens == {"a": 20} and second.num_scheduled_tokens == {"a": 1}
        (held,) = scheduler.kv_cache_manager.get_block_ids("a")
        scheduler.update_from_output(first, sampled(first, 7))  # a has ended; its second step is on the way
        third = scheduler.schedule()
        (fresh,) = third.scheduled_new_reqs
        assert (fresh.req_id, fresh.num_computed_tokens) == ("b", 0) and set(fresh.block_ids[0]) == set(held)
        assert third.finished_req_ids == {"a"}


def common_of(inputs, starts, counts, padded):
    """Common metadata whose device is "meta"."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    n = padded or len(counts)
    there = [x.to("meta") for x in (starts[: n + 1], inputs.lengths[:n], inputs.table[:n], inputs.slots)]
    return CommonAttentionMetadata(
        query_start_loc=there[0], query_start_loc_cpu=starts[: n + 1], seq_lens=there[1], num_reqs=n,
        num_actual_tokens=padded or sum(counts), max_query_len=max(counts), max_seq_len=LENGTH,
        block_table_tensor=there[2], slot_mapping=there[3], seq_lens_cpu_upper_bound=inputs.lengths[:n].clone(),
        is_prefilling=torch.ones(n, dtype=torch.bool),
    )  # fmt: skip
