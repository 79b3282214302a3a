"""A minute of ``examples/distill_demo.sh``: demo model, real text, all steps up to the comparison."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from kvpop_vllm.distill.metrics import read_metrics
from kvpop_vllm.scorers.checkpoint import read_scorer

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent / "examples/distill_demo.sh"


@pytest.mark.parametrize("kinds, data_words", [("", ""), ("champ perl", " --data champ perl")])
def test_texts_are_fetched_first_unless_a_folder_of_them_is_named(tmp_path, kinds, data_words):
    """Texts are fetched into the repository, here a copy of the script; a stand-in for the command records its arguments."""
    for folder in ("examples", "model", "data/held-out"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("model/config.json", "data/held-out/bible.jsonl"):
        (tmp_path / file).touch()
    stand_in, script = tmp_path / "kvpop", shutil.copy(SCRIPT, tmp_path / "examples")
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    stand_in.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "KVPOP": str(stand_in), "MODEL": str(tmp_path / "model"), "KINDS": kinds}
    for folder in ({}, {"DATA": str(tmp_path / "data")}):
        subprocess.run([script, tmp_path / "out", "--steps", "2"], env=env | folder, check=True, capture_output=True)
    fetch, *trained = (tmp_path / "asked").read_text().splitlines()
    assert fetch == f"distill texts --out {tmp_path}/data{data_words}" and trained[:2] == trained[2:]
    assert f"--data {tmp_path}/data/training --out {tmp_path}/out --steps 2" in trained[0]
    assert trained[1].startswith("eval ") and f"--data {tmp_path}/data/held-out/bible.jsonl" in trained[1]


def test_a_folder_without_text_to_compare_on_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "config.json").write_text("{}")
    env = {"PATH": os.environ["PATH"], "KVPOP": sys.executable, "MODEL": str(tmp_path), "DATA": str(tmp_path)}
    done = subprocess.run(["bash", SCRIPT, tmp_path / "out"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "held-out holds no text to compare on" in done.stderr


@pytest.mark.slow
def test_a_minute_of_it(tmp_path):
    data, out, steps = tmp_path / "data", tmp_path / "out", 10
    (data / "training").mkdir(parents=True)
    (data / "held-out").mkdir()
    lines = (json.dumps({"text": text}) + "\n" for text in topics.values())
    (data / "training/python.jsonl").write_text("".join(lines))
    shutil.copy(TESTS / "data/hamlet.txt", data / "held-out")
    size = {"DATA": str(data), "LENGTHS": "384", "SHARES": "3", "ROWS": "1"}
    env = os.environ | size | {"KVPOP": str(Path(sys.executable).with_name("kvpop")), "OMP_NUM_THREADS": "1"}
    options = f"--length 384 --window 64 --topk 60 --steps {steps} --warmup 2".split()
    done = subprocess.run([SCRIPT, out, *options], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [row["loss"] for row in read_metrics(out / "run/metrics.jsonl")]
    assert len(losses) == steps and sum(losses[-4:]) < 0.93 * sum(losses[:4]), losses
    assert read_scorer(str(out))[0].topk == 60
    lines = done.stdout[done.stdout.index("== hamlet.txt") :].splitlines()[1:]
    header, *table = (re.split(r"\s{2,}", line.strip()) for line in lines)
    rows = [dict(zip(header, row, strict=True)) for row in table if row[:2] == ["384", "128"]]
    hindsight = {row["policy"]: float(row["hindsight"]) for row in rows}
    assert hindsight[str(out)] > hindsight["random"] + 0.05, table
