"""Rules that every benchmark follows, tested without an engine.

No ratio is given without equal outputs, and rows name the machine and commit they were measured on.
"""

import argparse
import csv
import json
import subprocess
from contextlib import nullcontext

import batches
import chat
import child
import decode
import engines
import harness
import plain
import pytest
import record
import servers
from harness import BEFORE, BEFORE_AGAIN, DENSE, DRAFTS, EAGER, Configuration
from record import ROOT

KVPOP = Configuration("kvpop")


class Stub:
    """Engine stand-in that answers commands by ``answers``, whose functions take the command's arguments."""

    def __init__(self, **answers):
        self.answers = {"start": {"seconds": 1.0, "pool_bytes": 2**20}} | answers

    def send(self, command, **arguments):
        self.command = command, arguments

    def receive(self):
        command, arguments = self.command
        answer = self.answers[command]
        return answer(**arguments) if callable(answer) else answer

    def ask(self, command, **arguments):
        self.send(command, **arguments)
        return self.receive()


def tokens_of(tokens, *, gaps=None, shift=0.0):
    gaps = gaps or [2.0] * len(tokens)
    return [{"token": t, "logprob": -1.0 + shift, "gap": gap} for t, gap in zip(tokens, gaps, strict=True)]


STOCK = [tokens_of([1, 2, 3, 4]), tokens_of([5, 6, 7, 8], gaps=[2.0, 0.1, 2.0, 2.0])]
WRONG = [tokens_of([9, 2, 3, 4]), STOCK[1]]
FAILED = "output check failed, no ratio is given: kvpop, prompt 0, token 0: 9 instead of 1, gap 2.00\n"


@pytest.mark.parametrize(
    "measured, problem",
    [
        (STOCK, None),
        ([STOCK[0], tokens_of([5, 9, 9, 9])], None),  # the texts differ from the near tie on
        ([tokens_of([1, 2, 9, 4]), STOCK[1]], "x, prompt 0, token 2: 9 instead of 3, gap 2.00"),
        ([STOCK[0], tokens_of([5, 6, 7, 8], shift=-0.6)], "x, prompt 1, token 0: log-probability -1.60, stock -1.00"),
    ],
)
def test_outputs_are_compared_up_to_a_near_tie(measured, problem):
    assert harness.differs("x", STOCK, measured) == problem


def test_near_ties_everywhere_prove_nothing():
    stock = [tokens_of([1, 2, 3, 4], gaps=[0.1] * 4)]
    problem = harness.differs("x", stock, [tokens_of([9, 9, 9, 9])])
    assert problem == "x: near ties left only 1 of 4 tokens to compare"


def options_of(**options):
    common = dict(no_csv=False, eager=False, history=None, load_format="auto", dtype="bfloat16", speculative=0)
    common |= dict(threads=1, budget=1024, rounds=3, steps=2, starts=1)
    return argparse.Namespace(**common | options)


def columns_of(name: str) -> set[str]:
    """Return the columns of a recorded file, other than those that every row has."""
    with (ROOT / "benchmarks/results" / name).open() as file:
        return set(next(csv.reader(file))) - record.KEY.keys()


def test_configurations_follow_the_options(tmp_path):
    """Twins are of all policies, drafts of stock too, and peers come last; files name no eager twin."""
    words = "--policies kvpop streaming-llm kvpop --context 1000 --budget 900".split()
    options = decode.parse_arguments([*words, "--eager-too", "--against", str(record.ROOT)])
    chosen = harness.configurations(options, tmp_path)
    policies = ["kvpop, smollm2-135m-kvpop", "streaming-llm"]
    twins = [f"{policy}, {twin}" for twin in ("eager", "before", "before again") for policy in policies]
    assert [*map(str, chosen)] == ["dense", *policies, *twins]
    assert [name.settings.get("eager", False) for name in chosen] == [name.twin == EAGER for name in chosen]
    assert [name.settings.get("checkout") for name in chosen] == [None] * 5 + [str(record.ROOT)] * 4
    assert chosen[1].settings["policy"] == {
        "policy": "kvpop", "budget": 900, "scorer": str(harness.SHIPPED_SCORER), "allocator": "uniform"
    }  # fmt: skip
    assert harness.file_name({"configuration": chosen[3]}) == policies[0]
    drafted = harness.configurations(decode.parse_arguments([*words, "--speculative", "3"]), tmp_path)
    assert [name.settings.get("drafts", 0) for name in drafted] == [0] * 3 + [3] * 3


def test_rounds_are_paired(monkeypatch, capsys, tmp_path):
    """Ratios are those of one round, twins follow each other, and what another checkout takes is not written."""
    before, eager = KVPOP.with_twin(BEFORE), KVPOP.with_twin(EAGER)
    times = {DENSE: [40, 50, 60], KVPOP: [20, 20, 20], eager: [40, 20, 30], before: [10, 40, 40]}
    started, turns = {}, []
    for name, ms in ((name, iter(values)) for name, values in times.items()):

        def steps(requests, steps, name=name, ms=ms):
            turns.append(name)
            return {"ms": [next(ms)] * steps}

        started[name] = Stub(short=STOCK, prefill={"tokens": 1, "seconds": 1}, keep={"held_bytes": 7}, steps=steps)
    monkeypatch.setattr(harness, "engines", lambda options: nullcontext(started))
    options = options_of(context=[500], requests=[1], most_requests=1)
    monkeypatch.setattr(decode, "parse_arguments", lambda arguments: options)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert decode.main() == 0
    assert turns[:8] == [*turns[4:8][::-1], *turns[4:8]] and turns[:4] == [DENSE, KVPOP, before, eager]
    out = capsys.readouterr().out
    assert "/ stock 0.400 (0.333 to 0.500)  / before 0.500 (0.500 to 2.000), 95% interval 0.500 to 2.000" in out
    assert "/ compiled 1.500 (1.000 to 2.000)" in out
    rows = list(csv.DictReader((tmp_path / "decode.csv").open()))
    assert [(r["configuration"], r["mode"], r["dense_over_it"]) for r in rows[:3]] == [
        ("dense", "compiled", "1.000"), ("kvpop", "compiled", "2.000"), ("kvpop", "eager", "1.000"),
    ]  # fmt: skip
    assert len(rows) == 9 and {row["kv_bytes"] for row in rows} == {"7"}
    assert rows[0].keys() == columns_of("decode.csv") | record.KEY.keys()


def test_weights_at_random_give_no_ratio():
    seconds = {DENSE: {4000: 40, 8000: 100}, KVPOP: {4000: 10, 8000: 16}}
    started = {
        name: Stub(drain=lambda requests, prompt, new, by_prompt=by_prompt: {"seconds": by_prompt[prompt]})
        for name, by_prompt in seconds.items()
    }
    for load_format, ratios in {"dummy": [""] * 2, "auto": ["1.000", "4.000"]}.items():
        rows = batches.one_turn(started, 1, 4000, options_of(load_format=load_format))
        assert [row["over_dense"] for row in rows] == ratios and rows[0].keys() == columns_of("prefill.csv")
        assert ("/ stock" in harness.report(rows, ("context",), "tokens_per_s", load_format == "auto")) == any(ratios)


def test_the_long_prompt_needs_a_budget_that_holds_it():
    """Configurations without a budget hold all prompts."""
    shorter, longest = child.SHORT_PROMPTS[:-1], child.SHORT_PROMPTS
    assert [child.short_prompts(budget) for budget in (128, 767, 768, "")] == [shorter, shorter, longest, longest]


def test_batches_and_chats_have_the_columns_of_their_files():
    reply = {"seconds": 9.0, "cpu_seconds": 8.0, "most_running": 2, "preemptions": 0}
    started = {name: Stub(drain=reply | {"seconds": seconds}) for name, seconds in ((DENSE, 9.0), (KVPOP, 3.0))}
    options = options_of(requests=2, prompt=8, new=2, pool_tokens=1.5, rounds=1, turns=3, turn=5)
    rows = batches.whole_batches(started, options)
    assert [row["it_over_dense"] for row in rows] == ["1.000", "0.333"] and rows[0].keys() == columns_of("capacity.csv")
    row = chat.row("step", KVPOP, 1, 0.0125, 7, options)
    assert row["ms"] == "12.50" and row.keys() == columns_of("chat.csv")


def test_starts_are_pooled_and_another_checkout_is_compared_with_itself(monkeypatch, capsys):
    times = {
        DENSE: [8.0] * 6,
        KVPOP: [1, 2, 3, 4, 5, 6],
        KVPOP.with_twin(BEFORE): [1.0] * 6,
        KVPOP.with_twin(BEFORE_AGAIN): [2.0] * 6,
    }
    answers = {name: iter(ms) for name, ms in times.items()}
    constants = dict(short=STOCK, prefill={"tokens": 1, "seconds": 1}, keep={"held_bytes": 7})
    started = {
        name: Stub(**constants, steps=lambda requests, steps, ms=ms: {"ms": [next(ms)] * steps})
        for name, ms in answers.items()
    }
    monkeypatch.setattr(harness, "engines", lambda options: nullcontext(started))
    options = options_of(context=[7500], requests=[1], most_requests=1, starts=2, no_csv=True)
    monkeypatch.setattr(decode, "parse_arguments", lambda arguments: options)
    assert decode.main() == 0
    lines = {line.split("  ")[2]: line for line in capsys.readouterr().out.splitlines() if line.startswith("7500  1  ")}
    assert "/ before 3.500 (1.000 to 6.000), 95% interval 1.000 to 6.000" in lines["kvpop"]
    assert "/ before 2.000 (2.000 to 2.000)" in lines["kvpop, before again"]
    assert "/ before" not in lines["kvpop, before"]


@pytest.mark.parametrize("measure", ["decode", "prefill", "capacity", "chat"])
def test_every_measure_of_engines_stops_when_outputs_differ(capsys, monkeypatch, measure):
    """Nothing is timed, because the stubs answer nothing else."""
    monkeypatch.setattr(
        harness, "engines", lambda options: nullcontext({DENSE: Stub(short=STOCK), KVPOP: Stub(short=WRONG)})
    )
    assert engines.main(["--measure", measure]) == 1
    out, err = capsys.readouterr()
    assert err == FAILED and "/ stock" not in out


def test_load_stops_when_outputs_differ(capsys, monkeypatch, tmp_path):
    """Measurements of stub servers with different outputs are neither printed nor written."""
    answers = {DENSE: STOCK, KVPOP: WRONG}
    for name, stand_in in {
        "configurations": lambda options, folder: [*answers],
        "one_server": lambda name, *_: (answers[name], dict.fromkeys(servers.MEASURES, 1.0)),
    }.items():
        monkeypatch.setattr(servers, name, stand_in)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert engines.main(["--measure", "load"]) == 1
    out, err = capsys.readouterr()
    assert err.endswith(FAILED) and "kvpop" not in out and not (tmp_path / "load.csv").exists()


@pytest.mark.parametrize("number, first, last", [(5, 1, 5), (6, 1, 6), (9, 2, 8), (20, 6, 15)])
def test_interval_of_a_median(number, first, last):
    """Ranks agree with tables of the sign test; below six values the interval is the whole range."""
    assert harness.median_interval([float(number - i) for i in range(number)]) == (first, last)


def test_rows_carry_machine_date_and_commit(tmp_path):
    path = tmp_path / "results" / "some.csv"
    record.append(path, [{"budget": 1, "ms": "2.0"}])
    record.append(path, [{"ms": "3.0", "budget": 4}])
    rows = list(csv.DictReader(path.open()))
    assert [(row["budget"], row["ms"]) for row in rows] == [("1", "2.0"), ("4", "3.0")]
    assert all(row[name] for row in rows for name in ("machine", "cores", "date", "commit"))
    with pytest.raises(ValueError, match="has the columns .*, not .*other: move it away; these rows are in") as error:
        record.append(path, [{"budget": 1, "other": 2}])
    (row,) = csv.DictReader(open(str(error.value).split()[-1]))
    assert (row["budget"], row["other"]) == ("1", "2") and len(path.read_text().splitlines()) == 3


def test_only_what_is_measured_marks_a_commit_as_changed(tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results" / "decode.csv"
    results.parent.mkdir(parents=True)
    for path in (results, tmp_path / "kernel.cpp"):
        path.write_text("one\n")
    for command in ("init -q", "add -A", "-c user.name=n -c user.email=e commit -qm first"):
        subprocess.run(["git", "-C", str(tmp_path), *command.split()], check=True)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    results.write_text("two\n")
    clean = record.commit()
    assert clean and not clean.endswith("+")
    (tmp_path / "kernel.cpp").write_text("two\n")
    assert record.commit() == clean + "+"


def test_texts_for_drafts():
    """The file is given back with one field changed, soon after the part that is read; prose begins elsewhere for each seed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(harness.DEMO_MODEL, model_max_length=10**9)
    (text,) = decode.texts_of("json", str(harness.DEMO_MODEL), [1500], 1900)
    text_of_chat = tokenizer.decode(decode.json_text(tokenizer, 1500, 0))
    before, after = (
        json.loads(part[part.index("[\n") : part.rindex("]") + 1]) for part in text_of_chat.split("assistant\n")
    )
    (changed,) = (i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
    assert (
        before[changed] | {"count": 1000} == after[changed] and f"count of record {changed} set to 1000" in text_of_chat
    )
    assert '"count": 1000' in tokenizer.decode(text[1500:1800]) and len(text) == 1900
    first, second = decode.texts_of("prose", str(harness.DEMO_MODEL), [1500, 1483], 1900)
    assert len(set(first[:50]) & set(second[:50])) < 45 and first[:50] != second[:50]
    with pytest.raises(SystemExit, match="ends after .* tokens: raise --context"):
        decode.texts_of("json", str(harness.DEMO_MODEL), [1500], 8000)


def test_turns_of_drafts_fit_the_positions(capsys):
    """A request of which all drafts are accepted, in each step, has tokens to write until the last turn ends."""
    words = "--speculative 4 --requests 1 8 --context 7500".split()
    for rounds in ("5", "7"):
        options = decode.parse_arguments([*words, "--rounds", rounds])
        steps = -(-8 * 7500 // decode.STEP_TOKENS) + options.rounds * (child.WARM_UP + options.steps)
        assert 5 * steps <= options.written <= decode.POSITIONS - 7500
    with pytest.raises(SystemExit):
        decode.parse_arguments([*words, "--rounds", "9"])
    assert "840 generated tokens exceed the demo model's 8192 positions: lower" in capsys.readouterr().err


def test_tokens_are_timed_with_drafts(monkeypatch, capsys, tmp_path):
    """A token of each request takes the time of all steps by the tokens; twins are compared with and without drafts."""
    times = {DENSE: (50, 10), KVPOP: (20, 10), DENSE.with_twin(DRAFTS): (20, 4), KVPOP.with_twin(DRAFTS): (8, 4)}
    started = {
        name: Stub(
            short=STOCK,
            prefill=lambda lengths, new, texts: {"tokens": sum(lengths), "seconds": 1},
            keep={"held_bytes": 7},
            answer=lambda requests, tokens, ms=ms, steps=steps: {"ms": 10 * ms, "steps": steps, "tokens": 20},
        )
        for name, (ms, steps) in times.items()
    }
    monkeypatch.setattr(harness, "engines", lambda options: nullcontext(started))
    monkeypatch.setattr(decode, "texts_of", lambda kind, model, lengths, end: [[0] * end for _ in lengths])
    drafts = dict(speculative=4, texts=["json"], written=60)
    options = options_of(context=[500], requests=[2], most_requests=2, model="m", **drafts)
    monkeypatch.setattr(decode, "parse_arguments", lambda arguments: options)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert decode.main() == 0
    lines = (line for line in capsys.readouterr().out.splitlines() if line.startswith("json  500  2"))
    columns = ([part.strip() for part in line.split("  ") if part] for line in lines)
    shown = {name: values for _, _, _, name, *values in columns}
    assert shown["kvpop, drafts"] == [
        "8.0", "2.50", "/ stock 0.160 (0.160 to 0.160)", "/ no drafts 0.400 (0.400 to 0.400)",
        "/ stock with drafts 0.400 (0.400 to 0.400)",
    ]  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "speculative.csv").open()))
    assert len(rows) == 12 and {row["drafts"] for row in rows if "drafts" in row["configuration"]} == {"4"}


@pytest.mark.slow
def test_one_round_of_real_engines(monkeypatch, capsys, tmp_path):
    """Both engines start, give the same tokens and decode; the rows are one for each, and the table has their ratio."""
    small = "--eager --rounds 1 --requests 2 --context 60 --steps 3".split()
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert engines.main(["--measure", "plain", *small]) == 0
    with (tmp_path / "plain.csv").open() as file:
        rows = {row["configuration"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"without", "with"} and {row["round"] for row in rows.values()} == {"1"}
    table = capsys.readouterr().out
    for measure in plain.MEASURES:
        values = {name: float(row[measure]) for name, row in rows.items()}
        assert min(values.values()) > 0
        assert f"with / without {values['with'] / values['without']:.4f}" in table


def test_ratios_are_those_of_one_round():
    times = {"without": [10, 40, 20, 10, 10, 10], "with": [11, 40, 21, 12, 9, 10]}
    rows = [
        {"configuration": Configuration(name), "startup_s": str(value)}
        for name, values in times.items()
        for value in values
    ]
    shown = plain.summary(rows, "startup_s")
    assert shown == "startup_s: without 10.00, with 11.50; with / without 1.0250 (95% interval 0.9000 to 1.2000)"


@pytest.mark.parametrize("loaded", [["with"], [], ["without", "with"]])
def test_what_is_not_loaded_as_named_is_not_compared(monkeypatch, loaded):
    class Engine:
        def __init__(self, name):
            self.name = name

        def ask(self, command, **arguments):
            token = {"token": 1, "logprob": -1.0, "gap": 2.0}
            start = {"seconds": 2.0, "plugin": self.name in loaded}
            replies = {"start": start, "short": [[token]], "steps": {"ms": [3.0]}, "prefill": None, "random_tokens": []}
            return replies[command]

    monkeypatch.setattr(
        plain, "engines", lambda options, chosen: nullcontext({name: Engine(str(name)) for name in chosen})
    )
    values, problem = plain.one_round(list(plain.PLUGINS), argparse.Namespace(requests=1, context=1, steps=1))
    if loaded == ["with"]:
        assert problem is None and values == dict.fromkeys(plain.PLUGINS, {"startup_s": 2.0, "step_ms": 3.0})
    else:
        assert values == {}
        assert problem == f"the plugin is loaded in {loaded}, not in ['with']: install kvpop_vllm where vLLM is"
