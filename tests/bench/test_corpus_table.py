"""The table of cartridges in docs/compaction.md holds the figures of the records."""

from __future__ import annotations

import json
import re

import corpus_table
import pytest
import record

from kvpop_vllm.config import ConfigError

RECORDS = sorted(map(str, (record.RESULTS / "corpus").glob("*-self-study.jsonl")))


def test_documents_say_what_the_records_say():
    lines = {line["method"]: line for line in corpus_table.table_of(RECORDS, "truncation")}
    last, chosen, fitted = (lines[name] for name in ("truncation", "snapkv", "attention-matching"))
    ratio = "{:.2f} ({:.2f} to {:.2f})".format(fitted["kl ratio"], *fitted["kl ratio interval"])
    page = (record.ROOT / "docs/compaction.md").read_text()
    assert f"| {last['kl']:.3f} | {chosen['kl']:.3f} | {fitted['kl']:.3f} | {ratio} |" in page
    assert f"each of the others {fitted['MiB']:.0f} MiB" in page and last["MiB"] == chosen["MiB"] == fitted["MiB"]
    each = re.findall(r"(?m)^\| (?:bible|transcripts|shakespeare) [^|]*\|([^|]*)\|", page)
    assert sum(len(row.split(",")) for row in each) == last["documents"]


def test_a_document_that_a_method_did_not_finish_is_left_out(tmp_path):
    """Documents of two files have equal numbers, and are told apart."""
    (own,) = (path for path in RECORDS if "shakespeare" in path)
    lines = open(own, encoding="utf-8").read().splitlines(keepends=True)
    cut = [line for line in lines if (row := json.loads(line)).get("document") != 1 or row["method"] != "snapkv"]
    (tmp_path / "cut.jsonl").write_text("".join(cut))
    counts = [
        corpus_table.table_of([own, *more], "truncation")[0]["documents"] for more in ([], [tmp_path / "cut.jsonl"])
    ]
    assert counts == [2, 3]


def test_a_method_without_records_is_refused():
    with pytest.raises(ConfigError, match="no record of 'still': choose --against from attention-matching, "):
        corpus_table.table_of(RECORDS, "still")
