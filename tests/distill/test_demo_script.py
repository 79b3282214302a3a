"""A minute of ``examples/distill_demo.sh``: the demo model, real text, the whole way to the comparison."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from kvpop_vllm.distill.metrics import read_metrics
from kvpop_vllm.scorers.checkpoint import read_scorer

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_minute_of_it(tmp_path):
    data, out, steps = tmp_path / "data", tmp_path / "out", 16
    (data / "training").mkdir(parents=True)
    (data / "held-out").mkdir()
    (data / "manifest.json").write_text("{}")  # nothing is fetched
    lines = (json.dumps({"text": text}) + "\n" for text in topics.values())
    (data / "training/python.jsonl").write_text("".join(lines))
    shutil.copy(TESTS / "data/hamlet.txt", data / "held-out")
    size = {"DATA": str(data), "LENGTHS": "512", "SHARES": "4", "ROWS": "1"}
    environment = os.environ | size | {"KVPOP": str(Path(sys.executable).with_name("kvpop")), "OMP_NUM_THREADS": "1"}
    options = f"--length 512 --topk 60 --steps {steps} --warmup 2".split()
    script = TESTS.parent / "examples/distill_demo.sh"
    done = subprocess.run([script, out, *options], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [row["loss"] for row in read_metrics(out / "run/metrics.jsonl")]
    assert len(losses) == steps and sum(losses[-4:]) < 0.93 * sum(losses[:4]), losses
    assert read_scorer(str(out))[0].topk == 60
    table = done.stdout[done.stdout.index("== hamlet.txt") :].splitlines()[2:]
    hindsight = {row[5]: float(row[7]) for row in map(str.split, table) if row[:2] == ["512", "128"]}
    assert hindsight[str(out)] > hindsight["random"] + 0.05, table
