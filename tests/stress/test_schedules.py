"""A few random schedules agree with the oracle, and an engine that keeps fewer tokens is found."""

import pytest
from stress import schedules


@pytest.mark.slow
def test_some_schedules(capfd):
    assert schedules.main(["--count", "8", "--seed", "20"]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("8 schedules, 0 failed: ") and "answered" in last


def evicts(seed: int) -> bool:
    """Return whether a schedule of h2o has a long request with the server's budget, and no events."""
    drawn = schedules.Schedule(seed, "h2o", True)
    return not drawn.events and any(job.asks is None and len(job.tokens) > 60 for job in drawn.jobs)


@pytest.mark.slow
def test_a_fault_is_found_and_can_be_repeated(monkeypatch, capfd):
    make = schedules.make_case
    smaller = lambda *words, **options: (case := make(*words, **options))._replace(  # noqa: E731
        settings=case.settings | {"budget": case.settings["budget"] - 1}
    )
    monkeypatch.setattr(schedules, "make_case", smaller)
    seed = next(seed for seed in range(1, 10**5, len(schedules.KINDS)) if evicts(seed))
    assert schedules.main(["--count", "1", "--seed", str(seed)]) == 1
    shown = capfd.readouterr()
    assert "other tokens are retained than by the oracle" in shown.err
    assert (
        f"seed {seed} (h2o) failed; to repeat it: python tests/stress/schedules.py --count 1 --seed {seed}" in shown.err
    )


def test_a_seed_draws_one_schedule():
    first, again = (vars(schedules.Schedule(3, "kvpop", True)) for _ in range(2))
    assert {n: v for n, v in first.items() if n != "draw"} == {n: v for n, v in again.items() if n != "draw"}
    drawn = [schedules.Schedule(seed, "kvpop", True) for seed in range(100)]
    assert {"abort", "preempt", "reset"} == {event for one in drawn for event in one.events.values()}
    assert any(one.tight for one in drawn) and any(job.asks for one in drawn for job in one.jobs)
    assert max(len(job.tokens) + job.new for one in drawn for job in one.jobs) <= schedules.LENGTH
