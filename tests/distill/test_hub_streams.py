"""Data sets by their names on a hub: a server on this machine, which answers as the hub does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from distill.launching import IMPORTS, TESTS

FILES, RECORDS = 12, 30
CARD = """---
configs:
- config_name: default
  data_files:
  - split: high
    path: high-*.jsonl
  - split: low
    path: low.jsonl
---
"""
"""Card of a data set with two splits."""


def write_revision(folder):
    """Write the files of a revision, whose name is in its texts."""

    def write(name, records):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    folder.mkdir()
    (folder / "README.md").write_text(CARD)
    for i in range(FILES):
        texts = (f"{folder.name} {i} {j} words of a text that is longer" for j in range(RECORDS))
        write(f"high-{i:02}", [{"text": text, "effort": "high" if j % 3 else "low"} for j, text in enumerate(texts)])
    write("low", [{"text": f"{j} low " * 9, "effort": "low"} for j in range(RECORDS)])


@pytest.mark.slow
def test_streams_of_a_hub(tmp_path):
    """Revision, configuration, split and fields select; a stream goes on without the files before its place."""
    for name in ("main", "v1"):
        write_revision(tmp_path / name)
    command = [sys.executable, str(TESTS / "distill/hub_streams.py"), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    options = {"capture_output": True, "text": True, "timeout": 300, "env": environment | {"PYTHONPATH": IMPORTS}}
    outcome = subprocess.run(command, **options)
    (line,) = [line for line in outcome.stdout.splitlines() if line.startswith("RESULT")] or [outcome.stderr[-3000:]]
    result = json.loads(line.removeprefix("RESULT"))
    text = bytes(token for row in result["rows"] for token in row if token < 256).decode()
    numbers = [line.split()[1] for line in text.split("v1 ")[1:-1]]
    assert len(numbers) > 50 and all(int(number) % 3 for number in numbers) and "main" not in text
    assert result["row"] == result["rows"][-1]
    # the first file for the names of fields, then from the file before that of the place
    first, *following = result["requested"]
    assert first == "high-00.jsonl" and "high-08.jsonl" <= min(following) and len({*following}) >= 2
    assert result["whole"] == result["local"] and result["main"] != result["fingerprint"]
    revision, data_set, split = result["errors"]
    assert revision.startswith("hf:owner/name@v3:high cannot be read (Revision 'v3' doesn't exist")
    assert data_set.startswith("hf:owner/nobody cannot be read (Dataset 'owner/nobody' doesn't exist")
    assert split == "hf:owner/name@v1 has the splits high, low, not train: give one of them"
