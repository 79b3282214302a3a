"""What both model runners of vLLM make of the metadata builder for GPUs, by their own code; and its async scheduler. Run by
test_cuda_contract, in its process."""

from __future__ import annotations

import inspect

import pytest
import torch
from engine.pretended import PRETENDED, Pretended

RUNNERS = {}
if PRETENDED:
    from engine.cuda_engine import (
        LENGTH,
        MOST,
        RUNNERS,
        SLOTS,
        STREAMING,
        Inputs,
        configure,
        group_of,
        runner_v1,
        runner_v2,
    )

ROWS = [[11, 12, 13], [21], [31, 32, 33, 34]]


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


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

    def test_a_runner_that_does_not_say_prompts_is_refused(self, model):
        config = configure(model, {"policy": "snapkv", "budget": 96})
        inputs, group = Inputs(config), group_of(config)
        inputs.set([1, 40], [33, 40], ROWS)
        with pytest.raises(RuntimeError, match="does not say how long prompts are"):
            runner_v2(inputs, group)([1, 40])

    def test_runner_v2_says_prompts_before_it_builds(self):
        """And both runners by the methods that are wrapped."""
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
                    builder = group.get_metadata_builder()
                    if builder.needs_prompt:
                        builder.prompts = torch.full((MOST,), 70)
                    batch = builder.build(0, common).batch(0, None)
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
