"""Reports in responses and metrics equal what the recorder counts in the engine's pages and block tables."""

from dataclasses import replace
from statistics import fmean

import pytest
from engine.driving import BLOCK, Job, preempt_all, watched
from engine.matrix import BUDGET
from engine.test_cartridges import write
from policies.matrix import MILD_SHARES
from prometheus_client import REGISTRY
from vllm.exceptions import VLLMValidationError

from kvpop_vllm.cache.pages import cdiv
from kvpop_vllm.vllm_glue.extras import reports
from kvpop_vllm.vllm_glue.extras.metrics import COUNTERS, GAUGES, KEPT, SNAPSHOTS

PROTECTED = 33
CASES = {
    "full": ("qwen3", "full", {}),
    "streaming-llm": ("qwen3", "streaming-llm", {}),
    "kvpop, protected": ("qwen3", "kvpop", {"protect_prompt": PROTECTED}),
    "pyramid, protected": ("llama", "h2o-pyramid", {"protect_prompt": PROTECTED}),
    "triattention, heads": ("qwen3", "triattention", {"allocator": str(MILD_SHARES)}),
    "snapkv": ("qwen3", "snapkv", {"protect_prompt": True}),
    "adakv": ("qwen3", "adakv", {"protect_prompt": True, "budget": 64}),
    "attention-matching": ("qwen3", "attention-matching", {}),
    "dms": ("llama", "dms-query", {}),
}
QUICK = "kvpop, protected", "snapkv"
JOBS = [Job(7, new=9), Job(40, new=30), Job(90, new=40), Job(150, new=6)]


@pytest.fixture(scope="module", params=[pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def served(request, case):
    """Yield an engine whose statistics are on, and the name of its case."""
    if request.param == "full":
        model, settings = case("qwen3", "streaming-llm").model, {"policy": "full"}
    else:
        kind, policy, options = CASES[request.param]
        model, settings = (matrix_case := case(kind, policy, **options)).model, matrix_case.settings
    with watched(model, settings, None, disable_log_stats=False, num_gpu_blocks_override=241) as engine:
        yield engine, request.param
        assert not engine.leaks()


def asking(jobs: list[Job], **options) -> list[Job]:
    return [replace(job, scored=False, asks={"kv_report": 1} | (job.asks or {}) | options) for job in jobs]


def published(name: str, prefix: str = "vllm:kv_policy_") -> float:
    """Return a metric's value, of the only engine of this process."""
    (metric,) = [metric for metric in REGISTRY.collect() if metric.name == f"{prefix}{name}"]
    (value,) = [sample.value for sample in metric.samples if sample.name.endswith((name, f"{name}_total"))]
    return value


def histogram() -> dict[str, float]:
    """Return the sum, the count and the buckets of the histogram of retained shares."""
    (metric,) = [metric for metric in REGISTRY.collect() if metric.name == "vllm:kv_policy_retained_share"]
    ends = {
        sample.name.rsplit("_", 1)[1]: sample.value
        for sample in metric.samples
        if sample.name.endswith(("sum", "count"))
    }
    return ends | {sample.labels["le"]: sample.value for sample in metric.samples if "le" in sample.labels}


def counted(engine, name: str) -> tuple[int, list[int]]:
    """Return the tokens that a request's cache has seen, and the number that each head of each layer holds."""
    last = [steps[-1] for steps in engine.recorder.retained[name].values()]
    (tokens_seen,) = {step.tokens_seen for step in last}
    return tokens_seen, [len(head) for step in last for head in step.positions]


def rows(engine) -> dict[str, int]:
    """Return the number of blocks of each request after the last call of the scheduler; null blocks are none."""
    return {name: sum(map(bool, row)) for name, (*_, row) in engine.recorder.blocks[-1].running.items()}


def last_rows(engine) -> dict[str, int]:
    """Return the number of blocks that each request held last."""
    counts = {}
    for step in engine.recorder.blocks:
        counts |= {name: sum(map(bool, row)) for name, (*_, row) in step.running.items()}
    return counts


def bytes_of(engine) -> tuple[int, int]:
    """Return the bytes of a block in the caches of all layers, and of a token's float32 keys and values."""
    caches, config = engine.recorder.runner.kv_caches, engine.engine.vllm_config.model_config.hf_text_config
    block = sum(cache.nbytes for cache in caches) // engine.recorder.pool.num_gpu_blocks
    return block, len(caches) * config.num_key_value_heads * 2 * config.head_dim * 4


def check_report(engine, case: str, name: str, answer, job: Job, cartridge_slots: int = 0) -> dict:
    """Compare a report with the recorder's counts, and return it."""
    report = answer.kv_transfer_params["kv_report"]
    tokens_seen, heads = counted(engine, name)
    block, token = bytes_of(engine)
    protect = PROTECTED if "protected" in case else 0
    assert report["policy"] == engine.engine.vllm_config.additional_config["kv_policy"]["policy"]
    assert report["prompt_tokens"] == len(answer.prompt_token_ids) == len(job.tokens) + cartridge_slots
    assert report["generated_tokens"] == len(answer.outputs[0].token_ids) == job.new
    # the last token enters no cache
    assert report["seen_tokens"] == tokens_seen == len(job.tokens) + cartridge_slots + job.new - 1
    assert report["cartridge_tokens"] == cartridge_slots
    assert report["protected_tokens"] == min(tokens_seen, cartridge_slots + protect)
    retained = {"min": min(heads), "mean": fmean(heads), "max": max(heads)}
    if case == "adakv" and tokens_seen > BUDGET:
        retained |= {"min": None, "max": None}
    evicted = {
        statistic: None if retained[opposite] is None else tokens_seen - retained[opposite]
        for statistic, opposite in (("min", "max"), ("mean", "mean"), ("max", "min"))
    }
    assert report["kept_tokens_per_head"] == (None if case == "dms" else pytest.approx(retained))
    assert report["evicted_tokens_per_head"] == (None if case == "dms" else pytest.approx(evicted))
    assert report["blocks"] == last_rows(engine)[name] <= report["blocks_bound"]
    assert (report["bytes"], report["dense_bytes"]) == (report["blocks"] * block, tokens_seen * token)
    return report


def test_snapshots_are_counted(served):
    """Snapshots that were taken, gone on from and dropped, each under its own name, and vLLM's count of cached tokens."""
    engine, case = served
    if case != "kvpop, protected":
        pytest.skip("needs short requests that leave no snapshot, as in the case 'kvpop, protected'")
    snapshots = engine.recorder.manager.snapshots

    def counts() -> dict[str, float]:
        engine.serve([Job(20, new=2, scored=False)])  # its step publishes the counts; it is protected, and leaves none
        return {name: published(f"snapshots_{name}") for name in SNAPSHOTS}

    engine.engine.reset_prefix_cache()
    before, length = counts(), len(snapshots.all())
    (first,) = engine.serve([Job(150, new=5, scored=False)]).values()
    history = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    cached = published("prefix_cache_hits", "vllm:")
    engine.serve([Job(prompt=[*history, 5], new=2, scored=False)])
    assert published("prefix_cache_hits", "vllm:") - cached == len(history) - 1
    number_taken = len(snapshots.all()) - length
    after = counts()
    assert {name: after[name] - before[name] for name in SNAPSHOTS} == {"taken": number_taken, "hits": 1, "lost": 0}
    dropped = len(snapshots.all())
    engine.engine.reset_prefix_cache()
    assert number_taken > 1 and counts()["lost"] - after["lost"] == dropped


def test_reports(served):
    """The numbers are those of pages and block tables, also of requests that were preempted on their way."""
    engine, case = served
    again = lambda step: preempt_all(engine.recorder.scheduler) if step == 12 else None  # noqa: E731
    for each_step in (None, again):
        answers = engine.serve(asking(JOBS), each_step)
        reports = [
            check_report(engine, case, name, answer, JOBS[int(answer.request_id)]) for name, answer in answers.items()
        ]
        assert len(reports) == len(JOBS)
        assert (max(engine.recorder.preemptions.values()) > 0) == (each_step is not None)
    if case == "streaming-llm":
        longest = max(reports, key=lambda report: report["seen_tokens"])
        assert longest["blocks"] == longest["blocks_bound"] == cdiv(BUDGET, BLOCK)
        assert longest["bytes"] < longest["dense_bytes"] / 2 and longest["budget"] == BUDGET


def test_only_requests_that_ask_get_a_report(served):
    engine, _ = served
    jobs = [replace(JOBS[0], scored=False, asks=asks) for asks in (None, {"kv_report": 0}, {"kv_report": True})]
    answers = {answer.request_id: answer.kv_transfer_params for answer in engine.serve(jobs).values()}
    assert answers["0"] is None and answers["1"] is None and list(answers["2"]) == ["kv_report"]
    with pytest.raises(VLLMValidationError, match="^kv_report must be 0 or 1, got 2$"):
        engine.add("x", replace(JOBS[0], scored=False, asks={"kv_report": 2}))


def test_copies_of_heads_count(served, monkeypatch):
    """More ranks than KV heads hold copies of them."""
    engine, _ = served
    scheduler, (block, _) = engine.recorder.scheduler, bytes_of(engine)
    assert reports.bytes_of(3, scheduler) == 3 * block
    heads = engine.engine.vllm_config.model_config.hf_text_config.num_key_value_heads
    monkeypatch.setattr(scheduler.vllm_config.parallel_config, "tensor_parallel_size", 4 * heads)
    assert reports.bytes_of(3, scheduler) == 4 * 3 * block


def test_the_report_of_several_samples_is_that_of_the_last_to_end(served):
    engine, _ = served
    engine.add("x", *asking([Job(40, new=20, samples=3)]))
    answers = []
    while engine.engine.has_unfinished_requests():
        answers += engine.engine.step()
    assert len(answers[-1].outputs) == 3 and answers[-1].kv_transfer_params["kv_report"]["seen_tokens"] == 59


def test_metrics_of_running_requests(served):
    """After each step the gauges are sums over the requests that go on, of the recorder's counts."""
    engine, _ = served
    block, token = bytes_of(engine)
    peaks = []

    def compare(step):
        if not step:
            return
        running = [request.request_id for request in engine.recorder.scheduler.running]
        blocks = sum(rows(engine)[name] for name in running)
        tokens_seen = sum(counted(engine, name)[0] for name in running)
        assert published("blocks_held") == blocks and published("bytes_held") == blocks * block
        assert published("dense_bytes") == tokens_seen * token
        states = [engine.recorder.blocks[-1].running[name] for name in running]
        assert (
            published("blocks_bound")
            == sum(engine.spec.blocks(last, engine.spec.slots(*sizes)) for _, last, sizes, _ in states)
            >= blocks
        )
        peaks.append(blocks)

    engine.serve(asking(JOBS), compare)
    assert max(peaks) > 4 and all(published(name) == 0 for name in GAUGES)


def test_metrics_of_ended_requests(served):
    """Counters and histogram grow by the recorder's counts, of aborted requests too, if they had begun."""
    engine, case = served
    names = [name for name in COUNTERS if case != "dms" or name not in KEPT]
    before, shares = {name: published(name) for name in names}, None if case == "dms" else histogram()
    jobs = [replace(job, scored=False) for job in (*JOBS, Job(120, new=500), Job(30))]

    def abort(step):
        if name := {0: "5", 60: "4"}.get(step):
            engine.engine.abort_request([engine.names[name]], internal=True)

    assert len(engine.serve(jobs, abort)) == 4
    counts = [counted(engine, engine.names[name]) for name in "01234"]
    grown = {name: published(name) - before[name] for name in names}
    assert grown["tokens_seen"] == sum(tokens_seen for tokens_seen, _ in counts) > 500
    protect = PROTECTED if "protected" in case else 0
    assert grown["protected_tokens"] == sum(min(protect, tokens) for tokens, _ in counts)
    if case == "dms":
        all_names = {metric.name for metric in REGISTRY.collect()}
        assert not all_names & {f"vllm:kv_policy_{name}" for name in (*KEPT, "retained_share")}
        return
    now = histogram()
    retained = [fmean(heads) for _, heads in counts]
    assert grown["tokens_kept"] == pytest.approx(sum(retained))
    assert grown["tokens_kept"] + grown["tokens_evicted"] == pytest.approx(grown["tokens_seen"])
    assert now["count"] - shares["count"] == 5
    ratios = [mean / tokens_seen for mean, (tokens_seen, _) in zip(retained, counts, strict=True)]
    assert now["sum"] - shares["sum"] == pytest.approx(sum(ratios))
    assert now["0.999"] - shares["0.999"] == sum(ratio < 1 for ratio in ratios)
    assert (min(ratios) == 1) == (case == "full") and max(ratios) == 1, "some requests evict and some do not"


def test_the_policy_is_published(served):
    engine, _ = served
    (info,) = [metric for metric in REGISTRY.collect() if metric.name == "vllm:kv_policy_info"]
    (sample,) = info.samples
    settings = engine.engine.vllm_config.additional_config["kv_policy"]
    assert sample.labels["policy"] == settings["policy"] and sample.labels["scorer"] == settings.get("scorer", "none")
    assert int(sample.labels["budget"]) == engine.spec.budget
    assert sample.labels["layers"] == sample.labels["model_layers"] == "2"
    assert {metric.name for metric in engine.llm.get_metrics()} >= {f"vllm:kv_policy_{name}" for name in GAUGES}


def test_requests_with_options_and_cartridges(case, tiny_model, tmp_path):
    """Cartridges are part of the prefix, and a budget of a request is its own."""
    matrix_case = case("qwen3", "kvpop")
    settings = matrix_case.settings | {"cartridge": {"plain": write(tmp_path / "c", tiny_model("qwen3"), "plain")}}
    settings["max_protect"] = "all"
    with watched(matrix_case.model, settings, None, num_gpu_blocks_override=161) as engine:
        engine.recorder.slots = {"plain": 64}
        jobs = [Job(90, new=40, asks={"kv_cartridges": ["plain"]}), Job(90, new=40, asks={"kv_budget": 40}), JOBS[1]]
        budgets = BUDGET, 40, BUDGET
        for name, answer in engine.serve(asking(jobs)).items():
            i = int(answer.request_id)
            report = check_report(engine, "kvpop", name, answer, jobs[i], cartridge_slots=0 if i else 64)
            assert report["budget"] == budgets[i]
            assert report["evicted_tokens_per_head"]["max"] > 0
        protected = Job(90, new=40, asks={"kv_protect_prompt": "all"})
        (answer,) = engine.serve(asking([protected])).values()
        assert answer.kv_transfer_params["kv_report"]["protected_tokens"] == 90
