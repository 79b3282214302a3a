"""Speculative decoding under every policy but those that compress prompts: the engine equals the naive oracle.

Drafts are those of a proposer that knows how texts go on, so that every number of them is accepted.
"""

from __future__ import annotations

import itertools
import random
import shutil
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from distill.byte_tokenizer import byte_tokenizer
from engine import kinds
from engine.driving import BLOCK, Job, Judges, preempt_all, serving, watched
from engine.judge import Judge
from engine.matrix import BUDGET
from engine.proposer import CONFIG, DRAFTS, DrawnDrafts, drafting, mixed
from engine.test_cartridges import CartridgeJudge
from engine.test_cartridges import write as write_cartridge
from engine.test_sharing_features import adapter
from engine.test_traffic import POLICIES
from engine.text_drafts import N_GRAMS, SUFFIXES, check_drafts
from engine.tiny_engine import quick, running
from threads import one_thread
from vllm import SamplingParams

from kvpop_vllm.testing import random_prompt
from kvpop_vllm.vllm_glue.run import draft_pauses

STEPS = {"decay_step": 4, "decay_min": 0.9, "decay_max": 0.99}
QUICK = {
    "state": ("qwen3", "kvpop", {}),
    "state, protected": ("llama", "kvpop", {"protect_prompt": 40}),
    "mass, protected": ("qwen3", "h2o", {"protect_prompt": 40}),
    "recency, all protected": ("llama", "streaming-llm", {"protect_prompt": True}),
    "rounds, protected": ("qwen3", "vase", {"protect_prompt": 40}),
}
SLOW = {
    "state, all protected": ("llama", "kvpop", {"protect_prompt": True}),
    "state, moments": ("qwen3", "kvpop", {"correction": "moment"}),
    "state, fixed shares": ("qwen3", "kvpop", STEPS | {"allocator": "pyramid"}),
    "stateless": ("qwen3", "kvpop-linear", {"sinks": 0} | STEPS),
    "network, protected": ("llama", "kvpop-mlp", {"protect_prompt": 33}),
    "recency": ("qwen3", "streaming-llm", {}),
    "draws, protected": ("qwen3", "random", {"protect_prompt": 17}),
    "newest mass": ("llama", "tova", {}),
    "mass, fixed shares": ("llama", "h2o", {"allocator": "pyramid"}),
    "moments": ("llama", "momentkv", {}),
    "moments, protected": ("llama", "momentkv", {"protect_prompt": 40}),
    "gate": ("qwen3", "trimkv", {}),
    "gate, threshold": ("llama", "dms-query", {"protect_prompt": 33}),
    "gate over hidden states": ("llama", "kvzap-early", {}),
    "rounds": ("llama", "rkv", {}),
    "rounds, fixed shares": ("llama", "rkv", {"allocator": "pyramid"}),
    "rounds, statistics": ("qwen3", "triattention", {}),
}
CASES = QUICK | SLOW
LENGTHS = [1, 5, 16, 33, 40, 41, BUDGET - 1, BUDGET, 90, 130]


@contextmanager
def speculating(setup, **options):
    """Yield an engine of a case with the proposer."""
    with serving(setup, **{"num_gpu_blocks_override": 301, "speculative_config": CONFIG} | options) as engine:
        yield engine


@pytest.fixture(scope="module", params=[*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def served(request, case):
    kind, policy, options = CASES[request.param]
    with speculating(case(kind, policy, **options)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def refused_drafts_are_followed_by_others(monkeypatch):
    """Leave no drafts out, so that as many are verified as a test sets."""
    monkeypatch.setattr(draft_pauses, "LONGEST", 0)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    engine = request.getfixturevalue("served") if "served" in request.fixturenames else None
    if engine is not None:
        engine.chunk(None)
        engine.engine.reset_prefix_cache()
    yield
    assert engine is None or not engine.leaks()


def whole(answer) -> list[int]:
    return [*answer.prompt_token_ids, *answer.outputs[0].token_ids]


def jobs_of(lengths, new: int) -> list[Job]:
    return [Job(length, new=new, scored=False) for length in lengths]


def plain(engine, jobs: list[Job]) -> list[list[int]]:
    """Return the whole texts of jobs without drafts, by number of the job, and forget what was cached."""
    answers = engine.serve(jobs)
    engine.engine.reset_prefix_cache()
    return [whole(answers[engine.names[str(i)]]) for i in range(len(jobs))]


def forced(engine, jobs: list[Job], counts, each_step=None) -> dict:
    """Serve jobs without and with drafts, check the latter and return their answers."""
    with drafting(plain(engine, jobs), counts):
        answers = engine.serve(jobs, each_step)
    return answers


@pytest.mark.parametrize("right", [0, 1, DRAFTS])
def test_as_many_are_accepted(served, right):
    """All drafts of a step are refused, some are accepted, or all of them."""
    answers = forced(served, jobs_of((5, 33, BUDGET, 90), 30), itertools.repeat(right))
    served.check(answers)
    for name, answer in answers.items():
        assert max(served.chunks(name)[1:]) == 1
        assert len(served.chunks(name)) == 1 + steps_of(len(answer.prompt_token_ids), 29, right, served.spec)


def steps_of(start: int, new: int, right: int, spec) -> int:
    """Return the steps in which ``new`` tokens from position ``start`` on are made, with so many right drafts in each.

    Drafts end before the last token of a round.
    """
    steps, position = 0, start
    longest = min(spec.rounds, (spec.budget - spec.sinks - spec.window) // 2)
    rounds = (longest,) if spec.shares is None else (longest, -(-longest // 2))
    while position < start + new:
        room = min(m - 1 - position % m for m in rounds) if spec.rounds else DRAFTS + 1
        position += 1 + min(right, max(0, room - 1))
        steps += 1
    return steps


def test_mixed_numbers(served):
    """Requests of one step have other numbers of right drafts. Answers are those without drafts, near-ties apart."""
    jobs, near_ties = jobs_of(LENGTHS, 40), served.judge.near_ties
    answers = served.serve(jobs)
    served.check(answers)
    texts = [whole(answers[served.names[str(i)]]) for i in range(len(jobs))]
    served.engine.reset_prefix_cache()
    with drafting(texts, mixed()):
        answers = served.serve(jobs)
    served.check(answers)
    different = sum(whole(answers[served.names[str(i)]]) != text for i, text in enumerate(texts))
    assert different <= served.judge.near_ties - near_ties, "the oracle decided no tie of theirs"


TAILS = ["state, protected", "mass, protected", "recency, all protected"]
SLOW_TAILS = ["state, all protected", "network, protected", "draws, protected"]
"""Not those with moments: in long answers, which repeat themselves, their residuals tie."""


@pytest.mark.parametrize(
    "served", [*TAILS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TAILS)], indirect=True
)
def test_tails_begin_in_answers(served):
    """Tails begin with the first token of an answer, a later one, or a draft, and evict afterwards."""
    for right in (0, 2, DRAFTS):
        answers = forced(served, jobs_of((1, 36, 38, 39, 40), 110), itertools.repeat(right))
        served.check(answers)
        for name, answer in answers.items():
            slots = [head for steps in served.recorder.retained[name].values() for head in steps[-1].positions]
            assert max(map(len, slots)) < len(answer.prompt_token_ids) + 109, "nothing was evicted"


def test_chunks(served):
    """Prompts are read in chunks next to others' drafts."""
    served.chunk(7)
    jobs = [Job(1, new=50, scored=False), *jobs_of((29, 57, 130), 12)]
    answers = forced(served, jobs, mixed(1))
    served.check(answers)
    assert served.chunks(served.names["3"])[:19] == [7] * 18 + [4]


def test_preemption(served):
    """Requests with accepted drafts that are not in their caches yet start over."""

    def preempt(step):
        if step == 3:
            served.engine.reset_prefix_cache(reset_running_requests=True)
        if step == 6:
            preempt_all(served.recorder.scheduler)

    answers = forced(served, jobs_of((3, 40, 90, 130), 40), mixed(2), preempt)
    assert [served.recorder.preemptions[name] for name in answers] == [2] * 4
    served.check(answers)


def test_aborts(served):
    aborted = {3: ["2"], 6: ["0"]}
    answers = forced(
        served, jobs_of((3, 40, 90, 130), 40), mixed(3), lambda step: served.engine.abort_request(aborted.get(step, []))
    )
    finished = {name: answer for name, answer in answers.items() if answer.outputs[0].finish_reason == "length"}
    assert {answer.request_id for answer in finished.values()} == {"1", "3"}
    served.check(finished)


def test_a_small_pool(served):
    """Requests outgrow the pool with their drafts."""
    jobs = jobs_of(range(9, 15), 60)
    texts = plain(served, jobs)
    with served.small_pool(2 * (2 + served.spec.blocks(BUDGET))), drafting(texts, mixed(4)):
        answers = served.serve(jobs)
        assert sum(served.recorder.preemptions.values()) > 0 and len(answers) == 6
        served.check(answers)


def test_a_prompt_that_is_hit_but_for_its_last_token(served):
    """Such a request has as many drafts as it may have, all of them wrong. Its tail begins among them."""
    if served.judge.protect is not True:
        pytest.skip("needs the prompts of whole protection")
    scheduled, schedule = [], served.recorder.scheduler.schedule
    jobs = [Job(prompt=random_prompt(length, seed=length), new=20, scored=False) for length in (17, 33, 65, 97)]
    first = Job(7, new=40, scored=False)
    texts = plain(served, [first, *jobs])
    served.serve(jobs)

    def recorded(*args, **kwargs):
        step = schedule(*args, **kwargs)
        scheduled.extend([*tokens] for tokens in step.scheduled_spec_decode_tokens.values())
        return step

    with pytest.MonkeyPatch.context() as patch, drafting(texts, mixed(5)):
        patch.setattr(served.recorder.scheduler, "schedule", recorded)
        added = []

        def arrive(step):
            if step in (2, 4, 6, 8):
                added.append(str(1 + len(added)))
                served.add(added[-1], jobs[len(added) - 1])

        answers = served.serve([first], arrive)
    assert [tokens for tokens in scheduled if tokens[0] == -1] == [[-1] * DRAFTS] * len(jobs)
    assert sorted(answer.num_cached_tokens for answer in answers.values()) == [0, 16, 32, 64, 96]
    served.check(answers)


# Conversations


@pytest.fixture(scope="module", params=[("kvpop", 0), ("h2o", 40), ("momentkv", 0), ("vase", 0)], ids=str)
def chats(request, case):
    """Yield an engine whose requests go on from snapshots."""
    policy, protect = request.param
    setup = case("llama" if policy == "momentkv" else "qwen3", policy, protect_prompt=protect)
    with speculating(setup, max_model_len=1024, enable_prefix_caching=True) as engine:
        yield engine


@pytest.mark.parametrize("right, last", [(0, 1), (1, 0), (2, 0), (DRAFTS, 0)])
def test_each_turn_goes_on_from_the_one_before(chats, right, last):
    """Drafts that were accepted in the last step of an answer are in its snapshot, though not in its cache yet.

    An answer of 20 tokens ends with a draft, unless none is right. A draft that is right beyond its end does not count.
    """
    prompt, continuation = random_prompt(95, seed=right), random_prompt(45, seed=100 + right)
    asks = {"kv_report": 1}
    (first,) = plain(chats, [Job(prompt=prompt, new=20, scored=False)])
    (second,) = plain(chats, [Job(prompt=[*first, *continuation], new=20, scored=False)])
    with drafting([first, second], itertools.repeat(right)):
        (answer,) = chats.serve([Job(prompt=prompt, new=20, scored=False, asks=asks)]).values()
        before = {layer: [*steps] for layer, steps in chats.recorder.retained[chats.names["0"]].items()}
        assert whole(answer) == first
        length = answer.kv_transfer_params["kv_report"]["seen_tokens"]
        assert length == len(first) - last or (chats.spec.rounds and length in (len(first) - 1, len(first)))
        answers = chats.serve([Job(prompt=[*first, *continuation], new=20, scored=False)])
    (later,) = answers.values()
    assert later.num_cached_tokens == length
    for layer, steps in chats.recorder.retained[chats.names["0"]].items():
        steps[:0] = before[layer]
    chats.check(answers)
    assert whole(later) == second


@pytest.mark.parametrize("pauses", [0, draft_pauses.LONGEST], ids=["no pauses", "pauses"])
def test_an_answer_as_a_prompt(chats, pauses, monkeypatch):
    """All of it but its last token is in the snapshot, and vLLM proposes as many drafts for its first step as there can be."""
    monkeypatch.setattr(draft_pauses, "LONGEST", pauses)
    for new in range(14, 24):
        (first,) = plain(chats, [Job(prompt=random_prompt(100, seed=new), new=new, scored=False)])
        (second,) = plain(chats, [Job(prompt=first, new=20, scored=False)])
        with drafting([first, second], itertools.repeat(0)):
            chats.serve([Job(prompt=first[:100], new=new, scored=False)])
            (answer,) = chats.serve([Job(prompt=first, new=20, scored=False)]).values()
        assert answer.num_cached_tokens == len(first) - 1
        assert whole(answer) == second


@pytest.mark.parametrize("new", range(14, 19))
def test_an_answer_that_ends_within_drafts(chats, new):
    """The text goes on after the answer, so that drafts beyond its end are right; a chat goes on from its end."""
    prompt, continuation = random_prompt(70, seed=new), random_prompt(30, seed=200 + new)
    (text,) = plain(chats, [Job(prompt=prompt, new=30, scored=False)])
    first = text[: 70 + new]
    (second,) = plain(chats, [Job(prompt=[*first, *continuation], new=12, scored=False)])
    with drafting([text, second], itertools.repeat(DRAFTS)):
        (answer,) = chats.serve([Job(prompt=prompt, new=new, scored=False, asks={"kv_report": 1})]).values()
        before = {layer: [*steps] for layer, steps in chats.recorder.retained[chats.names["0"]].items()}
        assert whole(answer) == first
        (later,) = (answers := chats.serve([Job(prompt=[*first, *continuation], new=12, scored=False)])).values()
    # 1 + 5 i tokens are there after i steps with drafts, where no round cuts them
    expected = len(first) - (new % (1 + DRAFTS) == 1)
    assert answer.kv_transfer_params["kv_report"]["seen_tokens"] == later.num_cached_tokens
    assert later.num_cached_tokens == expected or (chats.spec.rounds and len(first) - later.num_cached_tokens in (0, 1))
    for layer, steps in chats.recorder.retained[chats.names["0"]].items():
        steps[:0] = before[layer]
    chats.check(answers)
    assert whole(later) == second


def test_settings_of_requests(case):
    """Requests of one batch have other budgets and protect other numbers of tokens; each reserves its blocks."""
    kind, options = POLICIES["kvpop"]
    setup, text = case(kind, "kvpop", **options), random_prompt(150, seed=96)
    asks = (
        None,
        {"kv_budget": 26},
        {"kv_budget": 72},
        {"kv_protect_prompt": 50},
        {"kv_budget": 64, "kv_protect_prompt": 7},
    )
    jobs = [
        Job(new=40, prompt=text[:length], asks=ask, scored=False)
        for length, ask in zip((3, BLOCK, 41, 60, 90), asks, strict=True)
    ]
    judges = Judges("kvpop", setup)
    settings = setup.settings | {"max_budget": 72, "max_protect": 50, "reserve": True}
    with speculating(setup._replace(settings=settings), max_model_len=512) as engine:
        answers = forced(engine, jobs, mixed(6))
        engine.check_blocks()
        for name, answer in answers.items():
            judges.of(jobs[int(answer.request_id)]).check({name: answer}, engine.recorder.retained)


def test_metrics_count_drafts(case):
    setup, prompt = case("llama", "streaming-llm"), {"prompt_token_ids": random_prompt(90, seed=1)}
    sampling = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True, detokenize=False)
    options = {"speculative_config": CONFIG, "block_size": BLOCK, "disable_log_stats": False}
    with running(setup.model, setup.settings, **options) as llm:
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
        with drafting([whole(answer)], itertools.repeat(2)):
            (with_drafts,) = llm.generate([prompt], sampling, use_tqdm=False)
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert whole(with_drafts) == whole(answer)
    drafts, accepted = (counts[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    assert (drafts, accepted) == (10, 20)


def test_the_inspect_page(case):
    """It shows what caches hold after each step, without drafts."""
    from engine.test_inspector import left, recorded

    setup = case("qwen3", "streaming-llm")
    with speculating(setup._replace(settings=setup.settings | {"inspect": True})) as engine:
        answers = forced(engine, [Job(7, new=9), Job(90, new=40), Job(150, new=6)], mixed(7))
        for name in answers:
            shown, numbers = recorded(engine.llm, name)
            assert (
                numbers["error"] is None and numbers["seen_tokens"] == engine.recorder.retained[name][0][-1].tokens_seen
            )
            assert (shown == left(engine, name)).all()


# What requests share


@pytest.mark.parametrize(
    "kind, policy", [("gemma3_text", "kvpop"), pytest.param("gpt_oss", "h2o", marks=pytest.mark.slow)]
)
def test_layers_with_windows(family, tmp_path, kind, policy):
    """Layers of vLLM's own see drafts as vLLM has them see; chats go on in both kinds of layers."""
    folder, oracle = family(kind)
    settings, judge = kinds.roles(policy, folder, tmp_path, oracle)
    with kinds.serving(folder, settings, kind, speculative_config=CONFIG, enable_prefix_caching=True) as engine:
        served, jobs = kinds.Served(engine, oracle, judge), jobs_of((1, 40, kinds.BUDGET, 130), 60)
        texts = plain(engine, jobs)
        with drafting(texts, mixed(10)):
            answers = served.serve(jobs, 16, lambda step: step == 9 and preempt_all(engine.recorder.scheduler))
            assert [whole(answers[engine.names[str(i)]]) for i in range(len(jobs))] == texts
        turn = Job(prompt=[*texts[2], *random_prompt(30, seed=7)], new=30, scored=False)
        (text,) = plain(engine, [turn])
        engine.serve(jobs[2:3])
        with drafting([text], mixed(11)):
            (answer,) = served.serve([turn]).values()
        assert whole(answer) == text and answer.num_cached_tokens == len(texts[2]) - 1


def test_adapters(case, tmp_path):
    """Requests under two adapters have other numbers of drafts, and are those of the merged weights."""
    from vllm.lora.request import LoRARequest

    setup, judges, adapters = case("qwen3", "kvpop", protect_prompt=True), [], []
    for number, name in enumerate(("first", "second"), 1):
        merged, folder = adapter(setup.model, tmp_path / name, seed=number)
        judges.append(Judge(str(merged), setup.judge.policy, protect=True))
        adapters.append(LoRARequest(name, number, str(folder)))
    jobs = [Job(length, new=40, scored=False, adapter=adapters[i % 2]) for i, length in enumerate((3, 40, 90, 130))]
    with speculating(setup, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        answers = forced(engine, jobs, mixed(12))
        for number, judge in enumerate(judges):
            engine.check({name: a for name, a in answers.items() if int(a.request_id) % 2 == number}, judge)


def test_cartridges(case, tmp_path):
    """Requests that begin with a cartridge, whose slots are no tokens for drafts."""
    setup = case("qwen3", "kvpop")
    folder = write_cartridge(tmp_path / "biased", setup.model, "biased")
    judge = CartridgeJudge(setup, [folder], 0)
    settings = setup.settings | {"cartridge": [f"biased={folder}"]}
    jobs = [Job(length, new=40, scored=False, asks={"kv_cartridges": ["biased"]}) for length in (1, 5, 40, 90)]
    with watched(setup.model, settings, speculative_config=CONFIG, num_gpu_blocks_override=301) as engine:
        engine.recorder.slots = {"biased": judge.slots}
        judge.check(forced(engine, jobs, mixed(13)), engine.recorder.retained)


OTHERS = [("qwen3", "l2norm"), ("qwen3", "full"), ("qwen3", "trimkv-kv"), ("qwen3", "kvzap"), ("qwen3", "dms")]


@pytest.mark.slow
@pytest.mark.parametrize("kind, policy", OTHERS)
def test_policies_that_no_oracle_judges_here(case, kind, policy):
    """Answers with drafts are those without."""
    setup, jobs = case(kind, policy), jobs_of((5, 33, 90, 130), 40)
    if policy == "full":
        setup = setup._replace(settings={"policy": "full"})
    with speculating(setup) as engine:
        texts = plain(engine, jobs)
        with drafting(texts, mixed(8)):
            answers = engine.serve(jobs)
        assert [whole(answers[engine.names[str(i)]]) for i in range(len(jobs))] == texts


@pytest.mark.parametrize("config", [N_GRAMS, SUFFIXES], ids=lambda config: config["method"])
def test_drafts_of_vllm(tiny_model, tmp_path, config):
    """Answers with drafts of vLLM are the oracle's and those of an engine without speculation, in fewer steps.

    They are made in another process: once vLLM has loaded numba for n-grams, no other engine starts in it.
    """
    if config is SUFFIXES:
        pytest.importorskip("arctic_inference", reason="make suffixes installs it")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(check_drafts, tiny_model("qwen3"), tmp_path, config).result()


def test_seeds_are_treated_as_stock_treats_them(case):
    """Sampled answers are those of a stock engine with the same drafts, where nothing is evicted."""
    setup = case("qwen3", "streaming-llm", budget=600)
    jobs = [*(replace(job, temperature=1.0) for job in jobs_of((5, 33, 90), 30)), Job(40, new=30, samples=3)]
    with speculating(setup) as engine:
        greedy = plain(engine, jobs_of((5, 33, 90, 40), 30))
        sampled = drawn(engine, jobs, greedy)
    with watched(setup.model, None, None, speculative_config=CONFIG, block_size=32) as engine:
        assert drawn(engine, jobs, greedy) == sampled
    assert len(sampled) == 6 and not any(text in greedy for text in sampled)


def drawn(engine, jobs: list[Job], texts: list[list[int]]) -> list[list[int]]:
    """Return the whole texts of sampled jobs, with drafts from other texts."""
    with drafting(texts, mixed(9)):
        return sorted(whole(answer) for answer in engine.serve(jobs).values())


LETTERS, PLACES = (3, 77, 150), 1 + DRAFTS
LARGEST = 29.59
"""The 0.999 quantile of the chi-square distribution with (letters - 1) x places = 10 degrees of freedom."""


@pytest.mark.slow
def test_draws_have_the_distribution_of_the_oracle(case, monkeypatch):
    """Among 12,000 sampled tokens, each of three letters is as frequent as the oracle's probabilities say.

    The oracle's probabilities are those after the tokens that were drawn before, under its evictions. Tokens are
    counted by their place in a step, and letters as the draft, the likeliest of the others, and so on. Draft and place
    follow from earlier tokens, so that deviations are uncorrelated and their covariances add up.
    """
    setup = case("qwen3", "kvpop")
    monkeypatch.setattr(DrawnDrafts, "tokens", LETTERS)
    monkeypatch.setattr(DrawnDrafts, "drafted", drafted := {})
    monkeypatch.setattr(DrawnDrafts, "draw", random.Random(5))
    config, prompts = CONFIG | {"model": "engine.proposer.DrawnDrafts"}, range(60)
    with running(setup.model, setup.settings, max_num_seqs=60, block_size=BLOCK, speculative_config=config) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": random_prompt(5 + i, seed=i)} for i in prompts],
            [SamplingParams(temperature=1, seed=i, max_tokens=200, ignore_eos=True, detokenize=False, allowed_token_ids=[*LETTERS]) for i in prompts],
            use_tqdm=False,
        )  # fmt: skip
    deviations = torch.zeros(PLACES, len(LETTERS), dtype=torch.float64)
    covariances = torch.zeros(PLACES, len(LETTERS), len(LETTERS), dtype=torch.float64)
    counts = [0] * PLACES
    for answer in answers:
        text, length = whole(answer), len(answer.prompt_token_ids)
        logprobs = setup.judge.models[0].run(text[:-1], setup.judge.policy.protecting(0, length)).logprobs
        place, drafts = 0, []
        for position in range(length, len(text)):
            draft = drafts[place] if place < len(drafts) else None
            odds = logprobs[position - 1, list(LETTERS)].softmax(0).tolist()
            ranked = sorted(zip(LETTERS, odds, strict=True), key=lambda pair: (pair[0] != draft, -pair[1]))
            p = torch.tensor([probability for _, probability in ranked], dtype=torch.float64)
            drawn_letter = [letter for letter, _ in ranked].index(text[position])
            deviations[place, drawn_letter] += 1
            deviations[place] -= p
            covariances[place] += p.diag() - p.outer(p)
            counts[place] += 1
            place += 1
            if text[position] != draft:
                place, drafts = 0, drafted.get(tuple(text[: position + 1]), [])
    assert sum(counts) == 12_000 and min(counts) > 50, counts
    d, c = deviations[:, 1:], covariances[:, 1:, 1:]
    statistic = float((d * torch.linalg.solve(c, d)).sum())
    assert statistic < LARGEST, (statistic, counts, deviations)


def test_options_of_requests(case, tmp_path, monkeypatch):
    """Stop strings within drafts, penalties, forms and words that are not allowed give the answers without drafts."""
    from vllm import LLM
    from vllm.sampling_params import StructuredOutputsParams

    setup, model = case("qwen3", "streaming-llm"), tmp_path / "model"
    shutil.copytree(setup.model, model)
    byte_tokenizer(eos="<0x00>").save_pretrained(model)
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 8 << 20, "dtype": "float32", "enforce_eager": True}
    prompt = {"prompt_token_ids": [token % 128 for token in random_prompt(70, seed=3)]}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "allowed_token_ids": [*range(33, 127)]}  # letters
    with one_thread(), quick():
        llm = LLM(
            str(model),
            additional_config={"kv_policy": setup.settings},
            block_size=BLOCK,
            speculative_config=CONFIG,
            **options,
        )

        def answer(texts, **parameters) -> tuple[list[int], str]:
            with drafting(texts, itertools.repeat(DRAFTS)):
                (output,) = llm.generate([prompt], SamplingParams(**greedy | parameters), use_tqdm=False)
            return output.outputs[0].token_ids, output.outputs[0].text, output.outputs[0].finish_reason

        tokens, text, _ = answer(())
        form = {"structured_outputs": StructuredOutputsParams(regex="[a-f]{30,90}")}
        for parameters in (
            {"stop": [text[21:23]]},
            {"stop_token_ids": [tokens[17]]},
            {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
            {"bad_words": [text[5]]},
            {"min_tokens": 30, "stop_token_ids": [tokens[3], tokens[33]]},
            form,
        ):
            expected = answer((), **parameters)
            texts = [[*prompt["prompt_token_ids"], *ids] for ids in (expected[0], tokens)]
            assert answer(texts, **parameters) == expected, parameters
            assert answer(texts[1:], **parameters) == expected, parameters
            stops = any(name.startswith("stop") for name in parameters)
            assert "min_tokens" in parameters or (expected[2] == "stop") == stops, parameters
        llm.llm_engine.engine_core.shutdown()
