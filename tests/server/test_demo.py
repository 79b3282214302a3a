"""`make demo` prints right figures and ends its server."""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import demo
import pytest
from serving import ServerError

from kvpop_vllm import policies
from kvpop_vllm.config import PolicySettings
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.testing import write_tiny_model


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_sigterm_stops_the_server_too(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    command = [sys.executable, demo.__file__, "--model", str(model), "--policy", "streaming-llm"]
    running, servers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), []
    try:
        assert running.stdout.readline().startswith("$ vllm serve")
        while not (servers := children(running.pid)):
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 128 + signal.SIGTERM
        end = time.monotonic() + 10  # the server's own children are reaped by others
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < end:
                os.killpg(servers[0], 0)  # the server leads the group of all its processes
                time.sleep(0.05)
    finally:
        running.kill()
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server, signal.SIGKILL)


def test_the_shipped_scorer_is_served_unless_another_is_asked_for():
    args = demo.arguments().parse_args([])
    assert args.policy == "kvpop" and args.scorer == Path(demo.__file__).parent / "scorers/smollm2-135m-kvpop"
    config, layers = read_scorer(str(args.scorer))
    assert (config.scorer, config.delayed, len(layers)) == ("mlstm", True, 30)
    (recipe,) = re.findall(r"^demo: .*\n\t(.*)", (Path(demo.__file__).parents[1] / "Makefile").read_text(), re.M)
    assert recipe.endswith("examples/demo.py")  # no further option


def test_the_report(tmp_path, capsys):
    """The report has the right bytes for 1,024 layers of one head.

    A token has 2 * 32 * 4 bytes per layer, a slot 264. Stock blocks have 128 tokens, ours 64 slots.
    """
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    shape = ModelShape("llama", 1024, 1, 32, 4096)
    policy = policies.get("streaming-llm")(PolicySettings("streaming-llm", 1024), shape)
    args = argparse.Namespace(model=tmp_path, policy="streaming-llm", dtype=demo.served_dtype(tmp_path))
    demo.report(args, policy, 2049, 16, [160, 10.0], [80, 2.5, 128])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(",")[1].split() for line in lines if line.startswith(("request", "pool"))]
    assert "2049 tokens in the request's cache, 1024 of them kept" in lines[1]
    assert [(row[1], row[3]) for row in rows] == [
        ("264.0", "256.0"),
        ("544.0", "512.2"),
        ("2640.0", "2560.0"),
        ("2560.0", "2048.0"),
    ]
    assert "10 requests of 4096 tokens; vLLM reports 10.0" in lines[6]
    with pytest.raises(ServerError, match="held 17 blocks, more than the 16"):
        demo.report(args, policy, 2049, 17, [160, 10.0], [80, 2.5, 128])
