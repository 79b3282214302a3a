"""Draws random schedules of requests, runs each in an engine, and compares all that it did with the oracle.

Usage: ``python tests/stress/schedules.py --count 1000 [--seed 0]``. A seed draws the policy with its plumbing,
arrivals, lengths, sizes of chunks, budgets, protection, seeds of draws, samples, aborts, preemptions, resets of
the prefix cache, and the size of the pool. Tokens held by every layer and head after every step, log-probabilities and
blocks are judged as in tests/engine. Freed blocks are overwritten with NaN. A schedule that fails is printed with the
command that repeats it, and the exit code is then 1.
"""

import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from kvpop_vllm.argument_types import non_negative, positive
from kvpop_vllm.testing import write_tiny_model

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "tests")]
import record  # noqa: E402
from engine.driving import Job, Judges, Watched, preempt_all, serving  # noqa: E402
from engine.judge import MOST_NEAR_TIES  # noqa: E402
from engine.matrix import make_case  # noqa: E402
from engine.test_fidelity import CASES  # noqa: E402
from engine.test_traffic import POLICIES, Traffic, allowing  # noqa: E402

LENGTH, BLOCKS, MOST_STEPS = 128, 81, 3000
"""Tokens of a request, blocks of the pool, and steps after which a schedule counts as hung."""
KINDS = [
    *((name, kind, name, options, True) for name, (kind, options) in POLICIES.items()),
    *((name, kind, policy, options, False) for name, (kind, policy, options) in CASES.items() if "GPU" not in name),
]
"""Name, kind of model, policy, options of the case, and whether requests ask for options of their own."""


class Schedule:
    """Random requests and events of one seed, independent of what the engine answers."""

    def __init__(self, seed: int, policy: str, asks: bool, protects: bool = False):
        self.draw = draw = random.Random(seed)
        traffic, long = Traffic(policy, seed), random.Random(f"{seed} long")
        together = draw.choice((1, 3, 8, 16))
        self.jobs: list[Job] = []
        for _ in range(draw.randint(1, together)):
            job = traffic.next()
            job.asks = job.asks if asks else None
            if protects and long.random() < 0.4:  # so that something is evicted after a protected prompt
                job.prompt, job.new = job.prompt[: LENGTH // 4], long.randint(LENGTH // 2, 3 * LENGTH // 4)
            job.scored = draw.random() < 0.2
            if draw.random() < 0.15:
                job.temperature = 1.0
            self.jobs.append(job)
            # a later request may continue this one's prompt, so that it hits cached blocks
            traffic.histories.append(job.tokens + [draw.randrange(256) for _ in range(job.new)])
        self.arrives = sorted(draw.randrange(1, 40) if draw.random() < 0.6 else 0 for _ in self.jobs)
        self.chunk = draw.choice((None, 1, 3, 7, 16, 33))
        self.varied = draw.random() < 0.3
        self.tight = draw.random() < 0.5
        self.room = draw.uniform(1, 3)
        events = [("abort", 0.2), ("preempt", 0.2), ("reset", 0.1)]
        self.events = {draw.randrange(2, 60): name for name, share in events if draw.random() < share * 2}


def run(schedule: Schedule, engine: Watched, judges: Judges) -> Counter:
    """Run a schedule, judge each request, and count what happened.

    Raises:
        AssertionError: the engine differs from the oracle, does not end, or leaks.
    """
    draw, recorder, jobs = schedule.draw, engine.recorder, schedule.jobs
    recorder.clear()
    engine.names.clear()
    assert engine.engine.reset_prefix_cache()
    running, answers, step = set(), {}, 0
    room = int(engine.spec.most_blocks(LENGTH) * schedule.room)
    with engine.small_pool(room) if schedule.tight else nullcontext():
        while step <= schedule.arrives[-1] or engine.engine.has_unfinished_requests():
            for name in [str(i) for i, arrival in enumerate(schedule.arrives) if arrival == step]:
                engine.add(name, jobs[int(name)])
                running.add(name)
            event = schedule.events.get(step)
            if event == "abort" and running:
                engine.engine.abort_request([draw.choice(sorted(running))])
                running &= engine.engine.output_processor.external_req_ids.keys()
            elif event == "preempt":
                preempt_all(recorder.scheduler)
            elif event == "reset" and not schedule.tight:  # blocks that are withheld cannot be reset
                engine.engine.reset_prefix_cache(reset_running_requests=True)
            engine.chunk(draw.choice((None, 1, 7, 16)) if schedule.varied else schedule.chunk)
            for answer in engine.engine.step():
                if answer.request_id in running and answer.finished:
                    running.remove(answer.request_id)
                    answers[answer.request_id] = answer
            step += 1
            assert step < MOST_STEPS, "the engine does not come to an end"
        engine.check_blocks()
    assert not running, f"no answer to {sorted(running)}"
    for name, answer in answers.items():
        job = jobs[int(name)]
        assert len(answer.outputs[0].token_ids) == job.new
        answer.sampled = job.temperature > 0
        judges.of(job).check({engine.names[name]: answer}, recorder.retained)
    assert not engine.leaks(), engine.leaks()
    hit, preempted = sum(a.num_cached_tokens for a in answers.values()), sum(recorder.preemptions.values())
    totals = {"steps": step, "answered": len(answers), "aborted": len(jobs) - len(answers)}
    return Counter(totals | {"preemptions": preempted, "tokens hit": hit})


def run_kind(number: int, seeds: list[int], root: Path) -> tuple[Counter, list[int]]:
    """Run the schedules of these seeds in one engine, or in a new one after a failure.

    Returns:
        Counts of what happened, and the seeds that failed.
    """
    name, kind, policy, options, asks = KINDS[number]
    case = make_case(str(write_tiny_model(root / kind, kind)), root / f"scorer-{number}", policy, **options)
    judges, counts, failed, left = Judges(policy, case), Counter(), [], list(seeds)
    # momentkv's scores vanish for several tokens at once, and the judge settles a tie of two
    protects = not asks and "protect_prompt" in options and policy != "momentkv"
    if asks:
        case = case._replace(settings=allowing(policy, case.settings))
    sizes = {"max_model_len": LENGTH, "num_gpu_blocks_override": BLOCKS}
    sizes |= {"enable_prefix_caching": False} if name.endswith("no sharing") else {}
    while left:
        try:
            with serving(case, **sizes) as engine:
                while left:
                    counts += run(Schedule(left[0], policy, asks, protects), engine, judges)
                    left.pop(0)
        except Exception:
            failed.append(left.pop(0) if left else seeds[-1])
            traceback.print_exc()
            again = f"python tests/stress/schedules.py --count 1 --seed {failed[-1]}"
            print(f"seed {failed[-1]} ({name}) failed; to repeat it: {again}", file=sys.stderr, flush=True)
    for judge in judges.by_options.values():
        counts += Counter({"decisions": judge.decisions, "near-ties": judge.near_ties})
    return counts, failed


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--count", type=positive, default=1000, help="schedules")
    parser.add_argument("--seed", type=non_negative, default=0, help="of the first schedule; the others follow")
    options = parser.parse_args(arguments)
    seeds, counts, failed = range(options.seed, options.seed + options.count), Counter(), []
    with tempfile.TemporaryDirectory(prefix="kvpop-schedules-") as root:
        for number, (name, *_) in enumerate(KINDS):
            seeds_of_kind, began = [seed for seed in seeds if seed % len(KINDS) == number], time.monotonic()
            if seeds_of_kind:
                happened, bad = run_kind(number, seeds_of_kind, Path(root))
                counts, failed = counts + happened, failed + bad
                print(
                    f"{name}: {len(seeds_of_kind)} schedules, {len(bad)} failed, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
    counts["near-ties"] += 0
    print(
        f"{options.count} schedules, {len(failed)} failed: " + ", ".join(f"{n} {event}" for event, n in counts.items())
    )
    near = counts["near-ties"]
    if excused := near > max(1, MOST_NEAR_TIES * counts["decisions"]):
        print(f"{near} decisions were excused as near-ties, too many of {counts['decisions']}", file=sys.stderr)
    return int(excused or bool(failed))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
