"""`examples/cartridge.sh` goes from a text to an answer, with the demo model."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_from_a_text_to_an_answer(tmp_path):
    lines = [f"Room {n} of the house is {colour}. " for n, colour in enumerate(["red", "blue", "green", "grey"] * 5)]
    (tmp_path / "text.txt").write_text("The house has many rooms. " + "".join(lines))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {
        "OUT": str(tmp_path / "cartridge"),
        "PORT": str(port),
        "BIN": str(Path(sys.executable).parent),
    }
    variables["COMPACT_OPTIONS"] = "--slots 64 --answers 2 --reference 512"
    variables["OPTIONS"] = "--max-model-len 1024 --enforce-eager --kv-policy streaming-llm --kv-budget 128"
    command = [str(ROOT / "examples" / "cartridge.sh"), str(tmp_path / "text.txt"), "What is the text about?"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) > 3
    tokens = int(done.stderr.split(" prompt tokens")[0].split()[-1])
    assert 64 < tokens < 200
    again = subprocess.run([command[0]], env=os.environ | variables, capture_output=True, text=True, timeout=30)
    assert again.returncode == 1 and "usage: examples/cartridge.sh TEXT [QUESTION]" in again.stderr
