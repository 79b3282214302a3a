"""Metadata that both model runners of vLLM build for GPUs by their own code, and vLLM's async scheduler.

test_cuda_contract runs this module in its process.
"""

from __future__ import annotations

import pytest
import torch
from engine.pretended import PRETENDED, Pretended

from kvpop_vllm.testing import write_random_scorer

if PRETENDED:
    from engine.cuda_engine import LENGTH, MOST, SLOTS, STREAMING, cache_of, configure, group_of
    from engine.cuda_runners import RUNNERS, without_a_gpu
else:
    STREAMING = {}  # for collection only

ROWS = [[11, 12, 13], [21], [31, 32, 33, 34]]


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


class TestRunners(Pretended):
    @pytest.fixture
    def runner(self, model, version):
        """Return ``make(policy)``, which returns a runner whose decode graphs have :data:`MOST` rows."""

        def make(policy=STREAMING):
            config = configure(model, policy, compilation_config={"cudagraph_capture_sizes": [MOST]})
            return RUNNERS[version](config, group_of(config))

        return make

    @pytest.fixture(params=["V1", "V2"])
    def version(self, request):
        return request.param

    def test_decodes_padded_to_a_captured_batch(self, runner):
        runner = runner()
        runner.step([1] * MOST, [60] * MOST, [[41, 42, 43, 44]] * MOST)
        found = runner.step([1, 1, 1], [33, 5, 64], ROWS)
        batch = found.batch(0, None)
        assert (found.num_tokens, batch.decodes, batch.tokens, batch.prefills) == (MOST, MOST, slice(0, MOST), ())
        assert batch.positions.tolist() == [32, 4, 63, -1]
        assert batch.table[:, 0].tolist() == [[11, 12, 13, 0], [21, 0, 0, 0], [31, 32, 33, 34], [0] * 4]
        assert batch.table.shape == (MOST, 2, 4) and batch.budgets.tolist() == [[64, 64]] * MOST

    def test_requests_with_sizes_of_their_own(self, runner):
        """Requests may have their own sizes in a padded batch, and the next step keeps nothing of them."""
        runner = runner(STREAMING | {"max_protect": True})
        rows = [ROWS[0], [*ROWS[2], 35], ROWS[1]]
        asked = [None, [20, 48, 30, None], [0, 40, 20, None]]
        for first in (True, False):
            found = runner.step([1, 1, 1], [33, 64, 5], rows, asks=asked if first else None)
            batch = found.batch(0, None)
            own = [64, 48, 40, 64] if first else [64] * 4
            assert batch.budgets.tolist() == [[budget] * 2 for budget in own]
            assert batch.windows.tolist()[1:3] == ([30, 20] if first else batch.windows.tolist()[:1] * 2)
            assert batch.protection.tokens.tolist() == ([0, 20, 0, 0] if first else [0] * 4)
        runner.step([1, 1, 1], [33, 64, 5], rows, asks=asked)
        chunks = runner.step([1, 30], [33, 60], [ROWS[0], [*ROWS[2], 35]], asks=[None, [0, 40, 20, None]]).batch(
            0, None
        )
        (chunk,) = chunks.prefills
        assert (chunk.budgets.tolist(), chunk.window) == ([40, 40], 20) and chunks.budgets.tolist() == [[64, 64]]

    def test_protected_prompts(self, runner):
        """Positions, tables and prefixes are right behind a prefix, inside one, at its end and in padding.

        A tail that begins at the end of a prefix is begun before the step.
        """
        runner, begun = runner(STREAMING | {"protect_prompt": True}), []
        builder = runner.group.get_metadata_builder()
        builder._begin_tails = lambda chosen, protected: begun.append((chosen, protected))
        assert runner.dummy(MOST, capture=True).batch(0, None).protection.tokens.tolist() == [0] * MOST
        runner.step([1] * MOST, [60] * MOST, [[41, 42, 43, 44]] * MOST, [9] * MOST)
        rows = [ROWS[0], [*ROWS[2], 35], ROWS[1]]
        batch = runner.step([1, 1, 1], [33, 64, 5], rows, [20, 63, 5]).batch(0, None)
        assert batch.positions.tolist() == [32, 63, 4, -1] and batch.decodes == MOST
        assert batch.table[:, 0].tolist() == [[13, 0, 0, 0], [35, 0, 0, 0], [0] * 4, [0] * 4]
        found = batch.protection
        assert found.tokens.tolist() == [20, 63, 5, 0] and found.table[1, :4].tolist() == ROWS[2]
        assert found.written.tolist() == [0, 1, 2, 3] and found.table.shape == (MOST, LENGTH // SLOTS)
        assert (found.blocks.tolist(), found.slots.tolist()) == ([0, 0, 21, 0], [0, 0, 4, 0])
        assert begun == [([], [0] * MOST), ([], [9] * MOST), ([1], [20, 63, 5, 0])] and len(found.begun) == 0
        addresses = {getattr(found, name).data_ptr() for name in ("tokens", "table", "blocks", "slots")}
        batch = runner.step([1, 20], [33, 35], [ROWS[0], [21, 22, 23]], [20, 30]).batch(0, None)
        found, (chunk,) = batch.protection, batch.prefills
        assert (chunk.start, chunk.end, chunk.protected, chunk.prefix_row[:2].tolist()) == (15, 35, 30, [21, 22])
        assert found.tokens.tolist() == [20] and found.written.tolist() == [0, *range(1, 16)]
        assert found.blocks.tolist() == [0, 21, *[22] * 14] and found.slots.tolist() == [0, 15, *range(14)]
        assert found.begun_tokens.tolist() == [30] and found.begun[:, 0, 0].tolist() == chunk.row[:1, 0].tolist() == [
            23
        ]
        assert {found.tokens.data_ptr(), found.table.data_ptr()} <= addresses

    def test_seeds(self, runner, version):
        """A row's seed is the server's plus the request's own, which only runner V2 has here."""
        from kvpop_vllm.kernels.draws import request_seed

        runner = runner({"policy": "random", "budget": 64, "window": 16})
        batch = runner.step([1, 1], [33, 5], ROWS[:2]).batch(0, None)
        own = set(range(100, 104)) if version == "V2" else {0}
        server = request_seed(runner.config.model_config.seed, 0)
        assert {seed - server for seed in batch.seeds[:2].tolist()} <= own
        batch = runner.step([1, 30], [33, 35], [ROWS[0], ROWS[2]]).batch(0, None)
        assert batch.prefills[0].seed - server in own

    @pytest.mark.parametrize("protect", [None, True])
    @pytest.mark.parametrize("capture", [False, True])
    def test_dummy_runs_are_padding(self, runner, version, capture, protect):
        """Dummy runs are padding, also where runner V1 has block-table rows of live requests."""
        runner, rows = runner(STREAMING | {"protect_prompt": protect}), [[*row, 9] for row in (*ROWS, [41])]
        before = runner.step([1] * MOST, [60] * MOST, rows, [1] * MOST).batch(0, None)
        assert before.positions.tolist() == [59] * MOST
        batch = runner.dummy(MOST, capture).batch(0, None)
        if version == "V1":
            assert runner.runner.input_batch.block_table[0].block_table.gpu[:MOST, 0].tolist() == [11, 21, 31, 41]
        assert batch.decodes == MOST and batch.positions.tolist() == [-1] * MOST and (batch.table == 0).all()
        assert batch.positions.data_ptr() == before.positions.data_ptr()

    def test_dummy_runs_of_longer_requests_are_left_out(self, model):
        """Dummy runs of longer requests are left out, but a prompt's first chunk is not.

        Runner V2 makes one before and one inside every piecewise graph.
        """
        config = configure(model)
        group = group_of(config)
        v2 = RUNNERS["V2"](config, group)
        assert v2.recorded(3, 5, full=False) is None and v2.built(lambda: v2.runner._dummy_run(5)) is None
        for runner in (v2, RUNNERS["V1"](config, group)):
            assert len(runner.step([1, 2, 2], [1, 2, 2], [[11], [21], [31]]).batch(0, None).prefills) == 2

    @pytest.mark.parametrize("protect", [None, True, 1])
    @pytest.mark.parametrize("state", [False, True])
    def test_the_warm_up_of_runner_v2(self, model, tmp_path, state, protect):
        """Runner V2's warm-up writes only tokens that have blocks, and its chunks begin at position 0.

        The warm-up counts blocks of keys and values only. With a state, decode rows have no blocks for their
        slots and are padding. At position 0 a page counts as empty, whatever it holds.
        """
        from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

        policy = STREAMING
        if state:
            policy = {
                "policy": "kvpop",
                "scorer": str(write_random_scorer(tmp_path / "scorer", model, sinks=2, window=6)),
            }
        policy = policy | {"protect_prompt": protect}
        config = configure(model, policy, compilation_config={"cudagraph_capture_sizes": [MOST]})
        runner, positions, starts = RUNNERS["V2"](config, group_of(config)), [], []
        runner.group.get_metadata_builder()._begin_tails = lambda *told: None

        def execute(output):
            if output.total_num_scheduled_tokens == 0:
                return runner.runner.finish_requests(output)
            batch = runner.built(lambda: runner.runner.execute_model(output)).batch(0, None)
            positions.extend(batch.positions.tolist())
            return starts.extend(chunk.start for chunk in batch.prefills)

        with without_a_gpu():
            warmup_kernels(runner.runner, execute, lambda grammar: None)
        assert run_mixed_prefill_decode_warmup(runner.runner, execute, lambda grammar: None, 16)
        written = not state or protect  # a protected token has a block
        assert set(positions) == ({-1, 0} if written else {-1}) and set(starts) == {0}

    def test_decodes_and_chunks(self, runner):
        found = runner().step([1, 30, 7], [33, 30, 71], [ROWS[0], [21, 22], ROWS[2]])
        batch = found.batch(0, None)
        assert (found.num_tokens, batch.decodes, batch.positions.tolist()) == (38, 1, [32])
        assert [(c.first, c.last, c.start) for c in batch.prefills] == [(1, 8, 64), (8, 38, 0)], "as runners order them"
        assert [c.row[:, 0].tolist() for c in batch.prefills] == [[31, 31], [21, 21]]

    def test_heads_of_ranks(self, model):
        """A rank's layout has the heads that the rank holds, for two KV heads on one, two and four ranks."""
        config = configure(model)
        for ranks, held in ((1, 2), (2, 1), (4, 1)):
            for index in range(ranks):
                builder = group_of(config, held, index=index, ranks=ranks).get_metadata_builder()
                assert builder.layout.num_kv_heads == held

    @pytest.mark.parametrize(
        "policy", [STREAMING, STREAMING | {"protect_prompt": True}, {"policy": "random", "budget": 64}]
    )
    def test_no_value_is_asked_for(self, model, policy):
        """A step reads no value from the device "meta", whose tensors have none.

        Nor may these tensors meet CPU tensors.
        """
        from attention.test_device_batch import NoWaiting

        builder = group_of(configure(model, policy), device="meta").get_metadata_builder()
        builder.prompts = builder.seeds = torch.full((3,), 50)
        for counts, rows in (([1, 1, 1], MOST), ([1, 30, 7], 3)):
            common = common_of(counts, rows)
            with NoWaiting():
                batch = builder.build(0, common).batch(0, None)
            assert batch.positions.device.type == "meta"


class TestAsyncScheduling(Pretended):
    def test_a_recycled_block_is_started_anew_by_a_later_step(self, model):
        """Blocks of a request that ends during its next step go to another request in a later step.

        vLLM holds blocks back for KV connectors only. The later step runs later on the same stream and begins
        at position 0, where kernels take a page for empty whatever it holds.
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
        scheduler = AsyncScheduler(config, cache_of(group, blocks=3), StructuredOutputManager(config), SLOTS)
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
        scheduler.update_from_output(first, sampled(first, 7))  # request a ends in its second step
        third = scheduler.schedule()
        (fresh,) = third.scheduled_new_reqs
        assert (fresh.req_id, fresh.num_computed_tokens) == ("b", 0) and set(fresh.block_ids[0]) == set(held)
        assert third.finished_req_ids == {"a"}


class TestHits(Pretended):
    def test_a_hit_leaves_the_last_protected_token(self, model):
        """A hit leaves the last protected token to compute, so a tail never begins in the step of its prefix.

        A request that hits blocks which another request computes in the same step begins before its own p.
        """
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        config = configure(model, STREAMING | {"protect_prompt": 2 * SLOTS}, async_scheduling=False)
        config.cache_config.num_gpu_blocks = 99
        scheduler = Scheduler(config, cache_of(group_of(config)), StructuredOutputManager(config), SLOTS)
        hasher = get_request_block_hasher(SLOTS, sha256)
        for name, length in (("a", 3 * SLOTS), ("b", 3 * SLOTS), ("c", 2 * SLOTS + 1), ("d", 2 * SLOTS)):
            scheduler.add_request(Request(name, [1] * length, SamplingParams(), None, block_hasher=hasher))
        step = scheduler.schedule()
        starts = {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
        assert starts == {"a": 0, "b": SLOTS, "c": SLOTS, "d": SLOTS}


def common_of(counts, rows):
    """Return common metadata of ``rows`` rows on the device "meta"."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *counts] + [0] * (rows - len(counts)), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    shapes = (rows + 1,), (rows,), (rows, LENGTH // SLOTS)
    there = [torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes]
    return CommonAttentionMetadata(
        query_start_loc=there[0], query_start_loc_cpu=starts, seq_lens=there[1], num_reqs=rows,
        num_actual_tokens=sum(counts), max_query_len=max(counts), max_seq_len=LENGTH, block_table_tensor=there[2],
        slot_mapping=torch.empty(256, dtype=torch.int64, device="meta"), is_prefilling=torch.ones(rows, dtype=torch.bool),
        seq_lens_cpu_upper_bound=torch.full((rows,), 64, dtype=torch.int32),
    )  # fmt: skip
