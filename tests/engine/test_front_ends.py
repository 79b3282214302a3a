"""Settings in every process of a server: parsed flags reach a process that loads the plugin late, or are refused there."""

import asyncio
import json
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from compaction.test_trained import write_model
from engine.test_cartridges import write
from engine.tiny_engine import PROMPTS, complete, configure, running
from vllm import SamplingParams
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvpop_vllm import flags
from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import write_random_scorer
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


def test_engines_with_other_settings_are_refused(tiny_model, tmp_path):
    """The line names the first flag that differs. Of files the contents are compared."""
    model = tiny_model("qwen3")
    scorers = [str(write_random_scorer(tmp_path / f"scorer {i}", model, seed=i)) for i in range(2)]
    cartridges = [write(tmp_path / name, model, name, slots=64) for name in ("plain", "biased")]
    shares = []
    for i, heads in enumerate(([1, 3], [3, 1])):
        shares.append(str(tmp_path / f"shares {i}.json"))
        Path(shares[i]).write_text(json.dumps({"shares": [heads] * 2}))
    shutil.copytree(scorers[0], tmp_path / "elsewhere")

    def settings(**changes) -> dict:
        return front_ends.settings_of(configure(model, SETTINGS | changes))

    class Client:
        vllm_config = None
        engine_core = SimpleNamespace()

    def check(*engines: dict, **changes) -> None:
        Client.vllm_config = configure(model, SETTINGS | changes)

        async def answers(method: str) -> list[dict]:
            assert method == "kvpop_settings"
            return list(engines)

        Client.engine_core.call_utility_all_async = answers
        asyncio.run(front_ends.check_engines(Client))

    check(settings(), settings(max_budget=64))
    for kv_policy, line in (
        (settings(budget=96), "--kv-budget 96, not 64"),
        (settings(policy="h2o"), "--kv-policy h2o, not streaming-llm"),
        (settings(max_budget=128), "--kv-max-budget 128, not 64"),
        (settings(allocator="pyramid"), "--kv-allocator pyramid, not uniform"),
    ):
        with pytest.raises(
            ConfigError, match=f"an engine of this API server has {line}: start every node with the same"
        ):
            check(settings(), kv_policy)
    for same, changes in (
        ({"policy": "kvpop", "scorer": scorers[0]}, {"scorer": scorers[1]}),
        ({"calibration": shares[0]}, {"calibration": shares[1]}),
        ({"cartridge": {"name": cartridges[0]}}, {"cartridge": {"name": cartridges[1]}}),
        ({"cartridge": {"name": cartridges[0]}}, {"cartridge": {"other": cartridges[0]}}),
    ):
        check(settings(**same), **same)
        (name,) = changes
        with pytest.raises(ConfigError, match=rf"has {flags.FLAGS[name]} .*, not .*: start every node with the same"):
            check(settings(**same), settings(**(same | changes)), **same)
    check(settings(policy="kvpop", scorer=str(tmp_path / "elsewhere")), policy="kvpop", scorer=scorers[0])


def test_requests_that_no_front_end_checked_are_refused(tiny_model):
    """Such a request fails alone, whatever it asks for; checked ones are answered before and after."""
    with running(tiny_model("qwen3"), SETTINGS) as llm:
        first, engine = complete(llm, 4), llm.llm_engine
        for extra_args in (None, {"kv_budget": 9999}):
            prompt = {"type": "token", "prompt_token_ids": PROMPTS[2]}
            request = engine.input_processor.process_inputs("name", prompt, SamplingParams(), ("generate",))
            request.sampling_params.extra_args = extra_args
            with pytest.raises(ConfigError, match="the front end that sent this request does not serve --kv-policy"):
                engine.engine_core.add_request(request)
        assert not engine.engine_core.engine_core.scheduler.requests
        assert complete(llm, 4) == first


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
