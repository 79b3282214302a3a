"""Settings in every process of a server: parsed flags reach a process that loads the plugin late, or are refused there."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from compaction.test_trained import write_model
from engine.tiny_engine import configure
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvpop_vllm.config import ConfigError
from kvpop_vllm.vllm_glue.start import front_ends

FLAGS = ["--kv-policy", "streaming-llm", "--kv-budget", "64"]
SETTINGS = {"policy": "streaming-llm", "budget": 64}
SPAWNED = """
import json, pickle, sys
args = pickle.load(sys.stdin.buffer)
from vllm import AsyncEngineArgs
assert "kvpop_vllm" not in sys.modules
print(json.dumps(AsyncEngineArgs.from_cli_args(args).additional_config))
"""
SERVED = """
import pickle, sys, uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.launcher import create_server_socket
args, sys.argv[0] = pickle.load(sys.stdin.buffer), "vllm"
socket = create_server_socket((args.host, args.port), reuse_port=True)
uvloop.run(run_server_worker(f"http://{args.host}:{args.port}", socket, args))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parsed(*options: str):
    """Return the arguments of ``vllm serve``."""
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    return parser.parse_args(["serve", *options])


def run(script: str, args, folder: Path) -> subprocess.CompletedProcess:
    """Run a script that reads parsed arguments, as an API server gets them, in a process without the plugin."""
    command, sent = [sys.executable, "-c", script], pickle.dumps(args)
    return subprocess.run(command, input=sent, capture_output=True, cwd=folder, timeout=600)


def test_flags_are_settings_where_the_plugin_is_loaded_late(tmp_path):
    """The flags may come from a file, and other keys of --additional-config stay."""
    file = tmp_path / "server.yaml"
    file.write_text("kv-policy: streaming-llm\nadditional-config: {'other': 1}\n")
    ended = run(SPAWNED, parsed("model", "--config", str(file), "--kv-budget", "64"), tmp_path)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == {"other": 1, "kv_policy": SETTINGS}


def test_without_flags_arguments_stay_as_they_are():
    assert parsed("model").additional_config == {}
    assert parsed("model", "--additional-config", '{"other": 1}').additional_config == {"other": 1}


def test_lost_flags_are_refused():
    """The line names the flags, and the settings as they can be given without flags."""
    args = parsed("model", *FLAGS)
    front_ends.check_flags(args, SimpleNamespace(additional_config={"kv_policy": SETTINGS | {"sinks": 2}, "other": 1}))
    front_ends.check_flags(parsed("model"), SimpleNamespace(additional_config={}))
    for lost in ({}, {"kv_policy": SETTINGS | {"budget": 96}}):
        with pytest.raises(ConfigError) as error:
            front_ends.check_flags(args, SimpleNamespace(additional_config=lost))
        instead = '{"kv_policy": {"policy": "streaming-llm", "budget": 64}}'
        assert str(error.value) == (
            f"--kv-policy and --kv-budget did not reach this API server: give --additional-config '{instead}' instead"
        )


def test_engines_with_other_settings_are_refused(tiny_model):
    """The line names the first flag that differs. Folders are not compared."""

    def settings(**changes) -> dict:
        return front_ends.settings_of(configure(tiny_model("qwen3"), SETTINGS | changes))

    class Client:
        vllm_config = configure(tiny_model("qwen3"), SETTINGS)
        engine_core = SimpleNamespace()

    def check(*engines: dict) -> None:
        async def answers(method: str) -> list[dict]:
            assert method == "kvpop_settings"
            return list(engines)

        Client.engine_core.call_utility_all_async = answers
        asyncio.run(front_ends.check_engines(Client))

    check(settings(), settings(max_budget=64))
    for other, line in (
        (settings(budget=96), "--kv-budget 96, not 64"),
        (settings(policy="h2o"), "--kv-policy h2o, not streaming-llm"),
        (settings(max_budget=128), "--kv-max-budget 128, not 64"),
        (settings(allocator="pyramid"), "--kv-allocator pyramid, not uniform"),
    ):
        with pytest.raises(
            ConfigError, match=f"an engine of this API server has {line}: start every node with the same"
        ):
            check(settings(), other)


@pytest.mark.slow
def test_a_server_without_its_flags_does_not_start(tmp_path):
    model = str(write_model(tmp_path / "model"))
    sizes = ["--max-model-len", "256", "--kv-cache-memory-bytes", str(16 << 20), "--enforce-eager"]
    args = parsed(model, *FLAGS, *sizes, "--host", "127.0.0.1", "--port", str(free_port()))
    args.model, args.additional_config = model, {}
    ended = run(SERVED, args, tmp_path)
    output = (ended.stdout + ended.stderr).decode()
    assert ended.returncode == 1, output[-2000:]
    assert output.count("kvpop: error: --kv-policy and --kv-budget did not reach this API server") == 1
    assert "ConfigError" not in output and "Application startup complete" not in output
