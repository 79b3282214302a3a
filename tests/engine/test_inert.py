"""Without a policy the plugin changes nothing, and engines do not affect each other."""

import functools
import inspect
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from engine.tiny_engine import backend, complete, configure, generate, running
from engine.vllm_changes import changed, state
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import write_mixed_model, write_random_scorer, write_tiny_model
from kvpop_vllm.vllm_glue import plugin
from kvpop_vllm.vllm_glue.ledger import EVERY, FRONT_END, LEDGER, REGISTERED, SCHEDULER, WORKER
from kvpop_vllm.vllm_glue.start import flags

TESTS = Path(__file__).resolve().parents[1]
LIGHT = {
    "kvpop_vllm",
    "kvpop_vllm.vllm_glue",
    "kvpop_vllm.vllm_glue.start",
    "kvpop_vllm.cache",
    "kvpop_vllm.cache.pages",
} | {
    *(f"kvpop_vllm.{name}" for name in ("config", "flags", "hub", "model_types", "roles", "supported")),
    *(f"kvpop_vllm.vllm_glue.{name}" for name in ("plugin", "ledger", "install")),
    *(
        f"kvpop_vllm.vllm_glue.start.{name}"
        for name in (
            "fallback contract flags engine_config refusals backend_choice cuda engine_policy published".split()
        )
    ),
}
"""Modules of this package that an engine without a policy may import."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Write a model whose first layer has a sliding window, one with Mamba2 layers and one with a gated delta net.

    Their folders are returned.
    """
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "mixed")
    kinds = {"model_type": "ministral", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 48}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | kinds | {"architectures": ["MistralForCausalLM"]}))
    recurrent = (write_mixed_model(tmp_path_factory.mktemp(kind), kind) for kind in ("nemotron_h", "qwen3_next"))
    return folder, *recurrent


@pytest.fixture(scope="module")
def fresh_processes(model, mixed, tmp_path_factory):
    """Return the reports of two stock engines in their own processes, with and without the plugin."""
    out = tmp_path_factory.mktemp("out")
    runs = {}
    for name, plugins in (("with", None), ("without", "")):
        environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
        environment |= {"PYTHONPATH": str(TESTS)} | ({} if plugins is None else {"VLLM_PLUGINS": plugins})
        command = [sys.executable, "-m", "engine.stock_run", str(out / name), str(model), *map(str, mixed)]
        runs[name] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for run in runs.values():
        printed, _ = run.communicate(timeout=600)
        assert run.returncode == 0, printed.decode()[-3000:]
    return {name: json.loads((out / name).read_text()) for name in runs}


def test_outputs_are_bit_identical_to_an_engine_without_the_plugin(fresh_processes):
    assert fresh_processes["with"]["outputs"] == fresh_processes["without"]["outputs"]
    loaded = {name: "kvpop_vllm.vllm_glue.plugin" in report["modules"] for name, report in fresh_processes.items()}
    assert loaded == {"with": True, "without": False}


def test_the_stock_backend_serves(fresh_processes):
    stock = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    assert [fresh_processes[name]["backend"] for name in ("with", "without")] == [stock, stock]


def test_nothing_heavy_of_ours_is_imported(fresh_processes):
    ours = {name for name in fresh_processes["with"]["modules"] if name.split(".")[0] == "kvpop_vllm"}
    assert ours <= LIGHT, sorted(ours - LIGHT)


def test_without_a_policy_only_what_the_ledger_says_is_wrapped(fresh_processes):
    always = sorted(row.target for row in LEDGER if row.process == EVERY and row.kind != REGISTERED)
    assert fresh_processes["with"]["wrapped"] == always
    assert fresh_processes["without"]["wrapped"] == []


def test_without_a_policy_there_are_no_other_metrics(fresh_processes):
    names = fresh_processes["with"]["metrics"]
    assert names == fresh_processes["without"]["metrics"] and "vllm:kv_cache_usage_perc" in names


def test_metrics_of_a_policy_go_with_its_engine(model):
    """A stock engine that follows one with a policy publishes nothing of the policy."""
    for policy, expected in (({"policy": "h2o", "budget": 64}, 13), (None, 0)):
        generate(model, policy, tokens=2, disable_log_stats=False)
        names = sorted(metric.name for metric in REGISTRY.collect() if "kv_policy" in metric.name)
        assert len(names) == expected, names


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """Return the attributes of vLLM that differ after each step of :mod:`engine.vllm_changes`, in its own process."""
    folder = tmp_path_factory.mktemp("changes")
    environment = os.environ | {"PYTHONPATH": str(TESTS), "VLLM_PLUGINS": ""}
    command = [sys.executable, "-m", "engine.vllm_changes", str(folder / "model"), str(folder / "report")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    return json.loads((folder / "report").read_text())


def targets(*conditions, processes=(FRONT_END, SCHEDULER, WORKER)):
    """Return the targets of the ledger's rows with one of these conditions."""
    return sorted({row.target for row in LEDGER if row.process in processes and row.when in conditions})


def test_without_a_policy_only_rows_of_every_process_differ(changes):
    """All attributes of vLLM's modules and classes are compared; an HTTP server also has what checks its settings."""
    assert changes["nothing"] == changes["again"] == changes["stock engine"] == []
    assert changes["load"] == targets("always", processes=[EVERY])
    assert changes["server"] == targets("HTTP server")


def test_with_a_policy_all_rows_differ_and_nothing_else(changes):
    """One engine has cartridges, which may be loaded, reports, seeds and the inspect page. Another one has a gate."""
    conditions = {row.when for row in LEDGER} - {"always", "HTTP server", "model runner V2"}
    assert changes["policy"] == targets(*conditions)


def test_what_is_compared(monkeypatch):
    """Attributes of modules and classes, and members of tables; of what vLLM changes itself, only members of ours."""
    from vllm.v1.attention.backends import registry

    before, table = state(), "vllm.v1.attention.backends.registry:_ATTN_OVERRIDES"
    monkeypatch.setattr(EngineArgs, "from_string", None, raising=False)
    monkeypatch.setattr(registry, "new", 1, raising=False)
    monkeypatch.setitem(registry._ATTN_OVERRIDES, AttentionBackendEnum.FLEX_ATTENTION, "other.Backend")
    names = {"vllm.engine.arg_utils:EngineArgs.from_string", "vllm.v1.attention.backends.registry:new", table}
    assert changed(before, state()) == names
    assert changed(before, state(), frozenset(names)) == set()
    monkeypatch.setitem(registry._ATTN_OVERRIDES, AttentionBackendEnum.FLEX_ATTENTION, "kvpop_vllm.Backend")
    assert changed(before, state(), frozenset(names)) == {table}


def test_engines_of_one_process_leave_each_other_alone(model, fresh_processes, tmp_path):
    """Stock engines and engines with a policy in turn give the same results as alone.

    Stock engines are compared with a process without the plugin. The number of threads of this process does
    not matter.
    """
    scorer = write_random_scorer(tmp_path / "scorer", model)
    policy = {"policy": "kvpop", "scorer": str(scorer)}
    stock = fresh_processes["without"]["outputs"][-1]
    bounded = generate(model, policy)
    assert as_json(generate(model, None)) == stock
    assert generate(model, policy) == bounded
    with running(model, None) as llm:
        assert backend(llm).__name__ == "CPUAttentionBackend" and as_json(complete(llm, 24)) == stock
        assert torch.get_num_threads() == fresh_processes["without"]["threads"] == 1
    assert as_json(bounded) != stock


def test_configs_made_first_and_loaded_later_keep_their_own_backend(model):
    """Each config keeps its own backend, although vLLM caches the choice under a key without the policy."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    def chosen(vllm_config):
        with set_current_vllm_config(vllm_config):
            return get_attn_backend(32, torch.float32, None)

    first = configure(model, {"policy": "streaming-llm", "budget": 64})
    stock = configure(model, None)
    second = configure(model, {"policy": "streaming-llm", "budget": 96})
    assert chosen(stock).__name__ == "CPUAttentionBackend"
    assert chosen(first).policy.retention.budget == 64
    assert chosen(second).policy.retention.budget == 96
    assert chosen(stock).__name__ == "CPUAttentionBackend"


def as_json(outputs):
    return json.loads(json.dumps(outputs))


def test_registering_again_changes_nothing():
    before = {name: EngineArgs.__dict__[name] for name in ("add_cli_args", "from_cli_args", "create_engine_config")}
    plugin.register()
    assert {name: EngineArgs.__dict__[name] for name in before} == before


def test_a_wrapper_of_another_plugin_around_the_choice_of_a_backend(model, monkeypatch):
    """The plugin registers if another plugin's wrapper hides the cache's methods.

    Engines with a policy get their own backend.
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention import selector

    original = inspect.unwrap(selector._cached_get_attn_backend)
    cached = functools.cache(original)

    @functools.wraps(cached)
    def theirs(*args, **kwargs):
        return cached(*args, **kwargs)

    for function, methods in ((theirs, False), (cached, True)):
        monkeypatch.setattr(selector, "_cached_get_attn_backend", function)
        plugin.register()
        ours = selector._cached_get_attn_backend
        assert ours is not function
        assert [hasattr(ours, name) for name in ("cache_clear", "cache_info")] == [methods] * 2
        for budget in (64, 96):
            with set_current_vllm_config(configure(model, {"policy": "streaming-llm", "budget": budget})):
                assert selector.get_attn_backend(32, torch.float32, None).policy.retention.budget == budget


def unwrapped(name):
    return EngineArgs.__dict__[name].__func__.__wrapped__


def test_add_cli_args_adds_only_the_group():
    ours, stock = FlexibleArgumentParser(), FlexibleArgumentParser()
    assert EngineArgs.add_cli_args(ours) is ours
    unwrapped("add_cli_args")(stock)
    extra = set(ours._option_string_actions) - set(stock._option_string_actions)
    switches = {setting.flag for setting in flags.settings_of(flags.ENGINE).values() if setting.kind is bool}
    expected = {*flags.FLAGS.values(), *(flag.replace("--", "--no-", 1) for flag in switches)}
    assert {option for option in extra if "-" in option} == expected
    count = len(ours._actions)
    flags.add_to(ours)
    assert len(ours._actions) == count


def parsed(*arguments):
    return EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(arguments))


def test_from_cli_args_returns_what_the_original_returns():
    for arguments in ([], ["--additional-config", '{"other": 1}'], ["--max-model-len", "64", "--seed", "3"]):
        arguments = parsed("--model", "m", *arguments)
        assert EngineArgs.from_cli_args(arguments) == unwrapped("from_cli_args")(EngineArgs, arguments)


def test_flags_reach_additional_config_and_win():
    config = '{"other": 1, "kv_policy": {"policy": "full", "sinks": 2}}'
    args = parsed("--model", "m", "--additional-config", config, "--kv-policy", "kvpop", "--kv-budget", "64")
    merged = EngineArgs.from_cli_args(args).additional_config
    assert merged == {"other": 1, "kv_policy": {"policy": "kvpop", "sinks": 2, "budget": 64}}
    wrong = {
        "does not hold an object": "text",
        "3, no object": {"kv_policy": 3},
        "asks for no policy": {"kv_policy": None},
    }
    for message, broken in wrong.items():
        with pytest.raises(ConfigError, match=f"^--kv-policy is given, but --additional-config .*{message}"):
            flags.merge(args, broken)
        assert flags.merge(Namespace(), broken) is broken


@pytest.mark.parametrize("policy", [None, {"policy": "streaming-llm", "budget": 64}])
def test_misspelt_keys_are_refused(model, policy):
    """A misspelt key is refused; vLLM would ignore it and serve densely."""
    with pytest.raises(ConfigError):
        configure(model, None, additional_config={"kv_polcy": {}} | ({"kv_policy": policy} if policy else {}))
