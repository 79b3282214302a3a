"""Metadata that both model runners of vLLM build for GPUs by their own code, and vLLM's async scheduler.

What the metadata say is compared with the CPU's in test_cuda_interpreted.py.
"""

import pytest
import torch
from engine.cuda_engine import HEADS, LENGTH, MOST, SLOTS, STREAMING, cache_of, configure, group_of, only_rank
from engine.cuda_runners import RUNNERS, without_a_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from kvpop_vllm.attention.shifted_scores import shift
from kvpop_vllm.cache.shares import EqualHeads, RegionShares
from kvpop_vllm.kernels.draws import request_seed
from kvpop_vllm.testing import write_random_scorer
from kvpop_vllm.vllm_glue.install import install
from kvpop_vllm.vllm_glue.ledger import SCHEDULER
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy

EQUAL = EqualHeads(HEADS)
ROWS = [[11, 12, 13], [21], [31, 32, 33, 34]]


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(params=RUNNERS)
def version(request):
    return request.param


@pytest.fixture
def runner(model, version):
    """Return ``make(policy)``, which returns a runner whose decode graphs have :data:`MOST` rows."""

    def make(policy=STREAMING):
        config = configure(model, policy, compilation_config={"cudagraph_capture_sizes": [MOST]})
        return RUNNERS[version](config, group_of(config))

    return make


def test_seeds(runner, version):
    """A row's seed is the server's plus the request's own."""
    runner = runner({"policy": "random", "budget": 64, "window": 16})
    batch = runner.step([1, 1], [33, 5], ROWS[:2]).batch(0, EQUAL)
    server = request_seed(runner.config.model_config.seed, 0)
    assert {seed - server for seed in batch.seeds[:2].tolist()} == {100, 101}
    batch = runner.step([1, 30], [33, 35], [ROWS[0], ROWS[2]]).batch(0, EQUAL)
    assert int(batch.seeds[0]) - server == 100 and int(batch.chunks.seeds[0]) - server == 101


def test_chunks_have_the_numbers_of_their_requests(runner):
    """Budgets and windows of chunks are compared with those that requests ask for, not with another plan."""
    runner, rows = runner(), [[1 + i, 11 + i] for i in range(3)]
    server = runner.group.get_metadata_builder().padding
    asks = [None, server._replace(budget=server.budget - 8, window=server.window - 1), None]
    chunks = runner.step([30, 31, 32], [30, 31, 32], rows, asks=asks).batch(0, EQUAL).chunks
    sizes = dict(zip(chunks.lengths, zip(chunks.budgets[:, 0].tolist(), chunks.windows, strict=True), strict=True))
    assert sizes == {30 + i: ((ask or server).budget, (ask or server).window) for i, ask in enumerate(asks)}


def test_a_row_never_keeps_another_requests_numbers(runner, version):
    """A row that a shorter step left out has the server's budget and window when a later request takes it."""
    runner, rows = runner(), [[1 + i, 11 + i] for i in range(3)]
    server = runner.group.get_metadata_builder().padding
    smaller = server._replace(budget=server.budget - 8, window=server.window - 1)
    for asks, shorter in (([None, None, smaller], True), ([None] * 3, False)):
        batch = runner.step([1] * 3, [60] * 3, rows, [1] * 3, asks).batch(0, EQUAL)
        sizes = zip(batch.budgets[:3, 0].tolist(), batch.windows[:3].tolist(), strict=True)
        assert sorted(sizes) == sorted((record.budget, record.window) for record in (ask or server for ask in asks))
        if shorter:  # a step that is not padded for a graph
            runner.step([1, 30], [60, 30], rows[:2], [1, 30])


@pytest.mark.parametrize("protect", [None, True])
@pytest.mark.parametrize("capture", [False, True])
def test_dummy_runs_are_padding(runner, version, capture, protect):
    """Dummy runs are padding, also where runner V1 has block-table rows of live requests."""
    runner, rows = runner(STREAMING | {"protect_prompt": protect}), [[*row, 9] for row in (*ROWS, [41])]
    before = runner.step([1] * MOST, [60] * MOST, rows, [1] * MOST).batch(0, EQUAL)
    assert before.positions.tolist() == [59] * MOST
    batch = runner.dummy(MOST, capture).batch(0, EQUAL)
    if version == "V1":
        assert runner.runner.input_batch.block_table[0].block_table.gpu[:MOST, 0].tolist() == [11, 21, 31, 41]
    assert batch.decodes == MOST and batch.positions.tolist() == [-1] * MOST and (batch.table == 0).all()
    assert batch.positions.data_ptr() == before.positions.data_ptr()


def test_dummy_runs_of_longer_requests_are_left_out(model):
    """Dummy runs of longer requests are left out, but a prompt's first chunk is not.

    Runner V2 makes one before and one inside every piecewise graph.
    """
    config = configure(model)
    group = group_of(config)
    v2 = RUNNERS["V2"](config, group)
    assert v2.recorded(3, 5, full=False) is None and v2.built(lambda: v2.runner._dummy_run(5)) is None
    for runner in (v2, RUNNERS["V1"](config, group)):
        batch = runner.step([1, 2, 2], [1, 2, 2], [[11], [21], [31]]).batch(0, EQUAL)
        assert len(batch.chunks) == 2
        assert batch.chunks.table.shape[2] == batch.table.shape[2]  # the width for which kernels are compiled


@pytest.mark.parametrize("protect", [None, True, 1])
@pytest.mark.parametrize("state", [False, True])
def test_the_warm_up_of_runner_v2(model, tmp_path, state, protect):
    """Runner V2's warm-up writes only tokens that have blocks, and its chunks begin at position 0.

    The warm-up counts blocks of keys and values only. With a state, decode rows have no blocks for their
    slots and are padding. At position 0 a page counts as empty, whatever it holds.
    """
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

    scorer = str(write_random_scorer(tmp_path / "scorer", model, sinks=2, window=6))
    policy = {"policy": "kvpop", "scorer": scorer} if state else STREAMING
    policy = policy | {"protect_prompt": protect}
    config = configure(model, policy, compilation_config={"cudagraph_capture_sizes": [MOST]})
    runner, positions, starts = RUNNERS["V2"](config, group_of(config)), [], []
    runner.group.get_metadata_builder()._begin_tails = lambda *args: None

    def execute(output):
        if output.total_num_scheduled_tokens == 0:
            return runner.runner.finish_requests(output)
        batch = runner.built(lambda: runner.runner.execute_model(output)).batch(0, EQUAL)
        positions.extend(batch.positions.tolist())
        return starts.extend(batch.chunks.starts)

    with without_a_gpu():
        warmup_kernels(runner.runner, execute, lambda grammar: None)
    assert run_mixed_prefill_decode_warmup(runner.runner, execute, lambda grammar: None, 16)
    written = not state or protect  # a protected token has a block
    assert set(positions) == ({-1, 0} if written else {-1}) and set(starts) == {0}


def test_a_recycled_block_is_started_again_by_a_later_step(model):
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
    assert config.scheduler_config.async_scheduling
    assert config.scheduler_config.get_scheduler_cls() is AsyncScheduler
    install(SCHEDULER, engine_policy(config))
    scheduler = AsyncScheduler(config, cache_of(group, blocks=3), StructuredOutputManager(config), SLOTS)
    assert not scheduler.defer_block_free

    def sampled(step, token):
        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [[token] for _ in names])

    params = SamplingParams(max_tokens=9, stop_token_ids=[7])
    for name in "ab":
        scheduler.add_request(Request(name, [1] * 20, params, None))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.num_scheduled_tokens == {"a": 20} and second.num_scheduled_tokens == {"a": 1}
    (blocks,) = scheduler.kv_cache_manager.get_block_ids("a")
    scheduler.update_from_output(first, sampled(first, 7))  # request a ends in its second step
    third = scheduler.schedule()
    (fresh,) = third.scheduled_new_reqs
    assert (fresh.req_id, fresh.num_computed_tokens) == ("b", 0) and set(fresh.block_ids[0]) == set(blocks)
    assert third.finished_req_ids == {"a"}


class NoWaiting(TorchDispatchMode):
    """A mode that fails if the host would wait for CUDA when a tensor moves to the meta device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        devices = {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim()}
        if "cpu" in devices and isinstance(out, torch.Tensor) and out.device.type == "meta":
            assert func is torch.ops.aten.copy_.default and args[2:] == (True,), f"{func} waits for the device"
        return out


POLICIES = {
    "streaming-llm": STREAMING,
    "protected": STREAMING | {"protect_prompt": True},
    "random": {"policy": "random", "budget": 64},
    "unequal": STREAMING | {"allocator": "pyramid"},
}


@pytest.mark.parametrize("name", POLICIES)
def test_no_value_is_asked_for(model, name):
    """A step reads no value from the device "meta", whose tensors have none.

    Nor may these tensors meet CPU tensors.
    """
    config = configure(model, POLICIES[name])
    group = group_of(config, device="meta")
    builder, layout = group.get_metadata_builder(), group.get_metadata_builder().layout
    shares = EqualHeads(layout.num_kv_heads)
    if name == "unequal":
        with only_rank(config):
            shares = RegionShares(group.backend.shares(), layout, 40, "meta")
    pages = layout.view(torch.empty(40, layout.num_kv_heads, layout.region_bytes, dtype=torch.uint8, device="meta"))
    builder.take_requests([None] * 3, [50] * 3)
    for counts, rows in (([1, 1, 1], MOST), ([1, 30, 7], 3)):
        common, gate_scores = common_of(counts, rows), torch.empty(sum(counts), layout.num_kv_heads, device="meta")
        with NoWaiting():
            batch = builder.build(0, common).batch(1, shares)
            if len(counts) == rows:
                assert shift(gate_scores, pages, batch, 2).shape == gate_scores.shape
        assert batch.table.device.type == batch.positions.device.type == batch.budgets.device.type == "meta"


def common_of(counts, rows):
    """Return common metadata of ``rows`` rows on the device "meta"."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *counts] + [0] * (rows - len(counts)), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    shapes = (rows + 1,), (rows,), (rows, LENGTH // SLOTS)
    tensors = [torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes]
    return CommonAttentionMetadata(
        query_start_loc=tensors[0], query_start_loc_cpu=starts, seq_lens=tensors[1], num_reqs=rows,
        num_actual_tokens=sum(counts), max_query_len=max(counts), max_seq_len=LENGTH, block_table_tensor=tensors[2],
        slot_mapping=torch.empty(256, dtype=torch.int64, device="meta"), is_prefilling=torch.ones(rows, dtype=torch.bool),
        seq_lens_cpu_upper_bound=torch.full((rows,), 64, dtype=torch.int32),
    )  # fmt: skip
