"""A short soak of a real server keeps its promises, and each promise can be broken."""

import copy
import json

import pytest
from compaction.test_trained import write_model
from stress import soak

OPTIONS = "--kv-policy streaming-llm --kv-budget 64 --kv-max-budget 128 --kv-max-protect all --max-model-len 512"
OPTIONS += f" --max-num-seqs 4 --max-num-batched-tokens 64 --kv-cache-memory-bytes {4 << 20} --enforce-eager"
OPTIONS = OPTIONS.split()


@pytest.mark.slow
def test_a_minute_of_load(tmp_path, capfd):
    """A minute is too short to ask for 2%."""
    model, log = write_model(tmp_path / "model"), tmp_path / "soak.jsonl"
    words = ["--minutes", "1", "--percent", "10", "--model", str(model), "--record", str(log), "--", *OPTIONS]
    code = soak.main(words)
    shown = capfd.readouterr()
    assert code == 0, shown.err + shown.out
    *rows, total = map(json.loads, log.read_text().splitlines())
    assert [row["round"] for row in rows] == [*range(len(rows))] and len(rows) >= soak.LEAST
    assert total["answered"] > 10 and total["refused"] and total["aborted"] and total["lost"] == 0
    assert total["asked_in_batch"] > 0 and total["broken"] == [] and total["cached_tokens"] > 0
    assert {"VLLM::EngineCore", "VLLM::Worker"} <= {name.split()[0] for name in total["MiB"]}
    assert len(shown.out.splitlines()) > len(rows)


def test_more_requests_at_once_than_the_server_admits(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 320, "max_position_embeddings": 4096}')
    load = soak.load_of(soak.parse_arguments(["--model", str(tmp_path), "--", *OPTIONS]))
    assert load["threads"] * soak.PROCESSES == 2 * 4
    expected = {"budgets": [32, 128], "protects": True, "draws": False, "policy": True, "length": 512, "step": 64}
    assert {name: load[name] for name in expected} == expected


def test_options_are_read_as_vllm_reads_them(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"vocab_size": 320, "max_position_embeddings": 4096}')
    words = ["--model", str(tmp_path), "--", "--max-model-len", "2k", "--max_num_batched_tokens=1K"]
    options = soak.parse_arguments(words)
    load = soak.load_of(options)
    assert (load["length"], load["step"], load["policy"]) == (2000, 1024, False)
    assert options.server == [*words[3:], "--max-num-seqs", "8"]
    assert soak.load_of(soak.parse_arguments([*words[:3], "--max-model-len", "auto"]))["length"] == 4096
    with pytest.raises(SystemExit):
        soak.load_of(soak.parse_arguments([*words, "--served_model_name", "other"]))
    assert "leave --served-model-name out" in capsys.readouterr().err


def row(number: int, **changes) -> dict:
    values = {"round": number, "time": 60.0 * number, "canaries": [True, True], "running": 0, "blocks": 2}
    values |= dict.fromkeys(soak.OUTCOMES, 5) | {"memory": {"engine 7": 1000 << 20}}
    values |= dict.fromkeys(("lost", "preemptions", "cached"), 0)
    return values | {"details": [], "waiting": 3, "in_batch": [True, False]} | changes


GOOD = [row(number) for number in range(10)]


def changed(number: int, **changes) -> list[dict]:
    rows = copy.deepcopy(GOOD)
    rows[number] |= changes
    return rows


BROKEN = {
    "memory of engine 7 went from 1002.0 to 1026.0 MiB, more than 2%": [
        row(number, memory={"engine 7": (1000 + 4 * (number - 2)) << 20}) for number in range(10)
    ],
    "3 blocks are in use and 0 requests are left after round 4, 2 and 0 before the load": changed(4, blocks=3),
    "2 blocks are in use and 1 requests are left after round 9, 2 and 0 before the load": changed(9, running=1),
    "canary 1 answered otherwise than at first after round 5": changed(5, canaries=[True, False]),
    "2 requests lost after round 3: status 500": changed(3, lost=2, details=["status 500", "status 500"]),
    "a client ended with code 1 after round 3": changed(3, details=["a client ended with code 1"]),
    "engine 7 has ended after round 6": changed(6, memory={}),
    "engine 8 is a new process after round 6": changed(6, memory=GOOD[0]["memory"] | {"engine 8": 1}),
    "no request was answered: raise --minutes": [row(number, answered=0) for number in range(10)],
}


@pytest.mark.parametrize("line", BROKEN)
def test_each_promise_can_be_broken(line):
    assert soak.broken_promises(GOOD, 2) == []
    broken = soak.broken_promises(BROKEN[line], 2)
    assert len(broken) == 1 and line in broken[0], broken


def test_what_counts_as_answered_and_refused():
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "n": 2}
    usage = {"prompt_tokens": 3, "completion_tokens": 8}
    assert soak.finished({"usage": usage}, body)[0] == "answered"
    assert soak.finished({"usage": usage | {"completion_tokens": 7}}, body)[0] == "lost"
    assert soak.finished({"usage": usage | {"prompt_tokens": 4}}, body)[0] == "lost", "another request's answer"
    refused = json.dumps({"error": {"message": "kv_budget 9 is more than this server allows"}})
    assert soak.refusal("bad", 400, refused)[0] == "refused"
    for way, status, text in (("whole", 400, refused), ("bad", 500, refused), ("bad", 400, "oops"), ("bad", 404, "{}")):
        assert soak.refusal(way, status, text)[0] == "lost"


def test_requests_are_the_same_for_the_same_seed():
    load = {"model": "m", "vocabulary": 320, "length": 512, "budgets": [32, 128], "protects": True, "draws": False}
    load |= {"policy": True, "cartridges": ["c"]}
    first, again = (
        [soak.drawn(draw, load) for _ in range(200)] for draw in (soak.random.Random(3), soak.random.Random(3))
    )
    assert first == again
    assert {way for way, _ in first} == {"whole", "stream", "cut", "abort", "bad"}
    for way, body in first:
        if way != "bad" and "prompt" in body:
            assert len(body["prompt"]) + body["max_tokens"] <= 512


def test_a_chat_goes_on_with_its_own_options():
    """Each turn begins with all tokens of the one before, until there is no room for another."""
    load, draw = {"vocabulary": 320, "length": 512}, soak.random.Random(3)
    first = {"model": "m", "prompt": [5] * 20, "vllm_xargs": {"kv_budget": 64}, "max_tokens": 3, "temperature": 0}
    assert soak.next_turn(draw, load, {}) is None
    chat, turns = first, 0
    while len(chat["prompt"]) <= 512 - 8:
        if (drawn := soak.next_turn(draw, load, chat)) is not None:
            way, body = drawn
            assert way == "whole" and body | {"prompt": 0, "max_tokens": 0} == first | {"prompt": 0, "max_tokens": 0}
            assert body["prompt"][: len(chat["prompt"])] == chat["prompt"] and len(body["prompt"]) > len(chat["prompt"])
            assert len(body["prompt"]) + body["max_tokens"] <= 512
            chat, turns = body | {"prompt": [*body["prompt"], *range(body["max_tokens"])]}, turns + 1
    assert turns > 2 and soak.next_turn(draw, load, chat) is None
