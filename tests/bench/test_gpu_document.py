"""docs/gpu.md says what the recorded files say."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
DOCUMENT = (ROOT / "docs" / "gpu.md").read_text()


def records(name: str) -> list[dict]:
    """Return the rows of a file of results."""
    with (RESULTS / f"{name}-2026-11-27.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the table whose heading begins with a text."""
    lines = DOCUMENT.partition(f"| {heading}")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def engines() -> dict[tuple, dict]:
    """Records of engines by engine, budget, requests, context and measure."""
    keys = "engine", "budget", "requests", "context", "measure"
    return {tuple(record[key] for key in keys): record for record in records("engines")}


def test_steps_of_engines(engines):
    columns = ("stock", ""), ("kvpop", "4096"), ("kvpop", "1024")
    for requests, *cells in rows_of("requests | stock, ms"):
        for (engine, budget), cell in zip(columns, cells, strict=True):
            record = engines.get((engine, budget, requests, "16384", "decode step"))
            if record is None:
                assert cell == "not measured"
            elif record["note"]:
                assert record["note"] == cell.replace(" requests fit", f" of {requests} requests fit")
            else:
                assert float(record["median"]) == pytest.approx(float(cell), rel=0.006)
                spread = float(record["high"]) / float(record["low"])
                assert spread < 1.02 or (engine, budget, requests) == ("kvpop", "4096", "64")


def test_other_measures_of_engines(engines):
    gap = "longest gap while 8192 tokens arrive"
    keys = ("64", "16384", "decoded tokens a second"), ("1", "4096", "first token"), ("1", "16384", "first token")
    for key, (_, *cells) in zip((*keys, ("16", "4096", gap)), rows_of("measure | stock"), strict=True):
        for engine, cell in zip((("stock", ""), ("kvpop", "4096")), cells, strict=True):
            value, record = float(cell.split()[0].replace(",", "")), engines[engine + key]
            assert float(record["median"]) == pytest.approx(value, rel=0.006)
            assert float(record["high"]) < 1.12 * float(record["low"])


def test_readme_says_the_same(engines):
    readme = " ".join((ROOT / "README.md").read_text().split())
    rates = [
        engines[(*engine, "64", "16384", "decoded tokens a second")] for engine in (("kvpop", "4096"), ("stock", ""))
    ]
    fast, slow = (float(rate["median"]) for rate in rates)
    sentence = "B = 4,096) 64 requests of 16,384 tokens decode three times as fast as in a dense cache, in which 24 fit"
    assert sentence in readme and rates[1]["note"] == "24 of 64 requests fit"
    assert 2.9 < fast / slow < 3.1
    first = [
        float(engines[(*engine, "1", "16384", "first token")]["median"])
        for engine in (("kvpop", "4096"), ("stock", ""))
    ]
    assert f"First tokens take {first[0] / first[1]:.1f} times as long" in readme


def test_attention():
    times = {(record["attention"], record["requests"], record["tokens"]): record for record in records("attention")}
    columns = ("FlashAttention 3", "16384"), ("FlashAttention 3", "65536")
    columns += tuple((f"{rule} B={budget}", budget) for rule in ("recency", "kvpop") for budget in ("1024", "4096"))
    for requests, *cells in rows_of("requests | FlashAttention 3"):
        for (name, tokens), cell in zip(columns, cells, strict=True):
            assert round(float(times[name, requests, tokens]["value"])) == int(cell.replace(",", ""))


def test_answers():
    answers = {record["engine"]: record for record in records("answers")}
    names = "stock", "kvpop, nothing evicted", "kvpop at 1/4", "window at 1/4"
    for name, (_, exact, same) in zip(names, rows_of("engine | exact answers"), strict=True):
        assert (answers[name]["exact"], answers[name]["same_tokens"]) == (exact, same)


def test_checks_of_kernels():
    checks = [record for record in records("kernels") if " right" in record["case"]]
    assert {record["verified"] for record in checks} == {"yes"}
    rules = [{record["case"] for record in checks if record["case"].startswith(f"{op} is right, ")}
             for op in ("decode_step", "prefill_chunk")]  # fmt: skip
    assert len(rules[0]) == len(rules[1]) == 12
