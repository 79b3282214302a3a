"""README's examples, as printed: `kvpop` commands, one server that answers all questions, and transformers.

They run in a folder that looks like the checkout and holds a short handbook.txt. The port is a free one.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import readme
from serving import Server

pytestmark = pytest.mark.slow

COMMANDS = readme.printed_commands()
SERVERS = [shlex.split(text) for text in COMMANDS if text.startswith("vllm serve ")]
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
PORT = "localhost:8000"
"""Address of the printed examples."""


def run(folder: Path, text: str) -> str:
    """Run a shell command in a folder, and return what it prints to stdout."""
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_python(folder: Path, text: str) -> str:
    """Run a Python example in a folder, and return what it prints to stdout."""
    (folder / "example.py").write_text(text)
    return run(folder, "python example.py")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Folder with the repository's models, examples and licence, a handbook, and the cartridge that README makes of it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("models", "examples", "LICENSE"):
        (folder / name).symlink_to(readme.ROOT / name)
    passage = (readme.ROOT / "tests/data/hamlet.txt").read_text(encoding="utf-8")[:1400]
    (folder / "handbook.txt").write_text(passage, encoding="utf-8")
    (compact,) = (text for text in COMMANDS if text.startswith("kvpop compact "))
    run(folder, compact)
    return folder


@pytest.fixture(scope="module")
def server(checkout):
    """The last printed server. The others are this one with fewer options."""
    *shorter, last = SERVERS
    for words in shorter:
        assert words == last[: len(words)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(checkout)
        with Server(last[2], *last[3:]) as running:
            yield running


def test_a_question_and_its_printed_answer(checkout, server):
    """Rounding may change words of a small model's answer. Which license it is, and the second line, are as printed."""
    (example,) = (block for block in readme.blocks("python") if PORT in block)
    answer, report = run_python(checkout, example.replace(PORT, f"127.0.0.1:{server.port}")).strip().rsplit("\n", 1)
    (printed,) = readme.blocks("")
    assert printed.splitlines()[1:] == [report]
    assert "Apache License" in printed.splitlines()[0] and "Apache License" in answer
    assert (
        re.search(r"A dense cache would hold (\d+) MiB", readme.README)[1]
        == f"{2272 * 30 * 2 * 3 * 64 * 2 / 2**20:.0f}"
    )


def test_a_question_to_a_cartridge(checkout, server):
    (ask,) = (text for text in COMMANDS if text.startswith("curl "))
    answer = json.loads(run(checkout, ask.replace(PORT, f"127.0.0.1:{server.port}")))
    assert answer["model"] == "handbook" and answer["choices"][0]["message"]["content"]
    slots = json.loads((checkout / "handbook/kvpop_cartridge.json").read_text())["slots"]
    assert slots == 256 and answer["usage"]["prompt_tokens"] > slots


@pytest.mark.parametrize("words", SERVERS, ids=range(len(SERVERS)))
def test_servers_are_resolved(checkout, words):
    """Every printed option is one of vLLM's or of the plugin's, and the policy is resolved."""
    assert "all right" in run(checkout, shlex.join(["kvpop", "doctor", *words[2:]]))


def test_doctor(checkout):
    (doctor,) = (text for text in COMMANDS if text.startswith("kvpop doctor"))
    assert run(checkout, doctor).splitlines()[-1] == "all right"


def test_transformers(checkout):
    (example,) = (block for block in readme.blocks("python") if "transformers" in block)
    assert run_python(checkout, example).startswith("Once upon a time")
