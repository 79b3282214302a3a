"""vLLM has what the package relies on, and the checks find what it lacks.

For a version that is not installed: ``python -m tests.engine.compare_vllm FOLDER``.
"""

import importlib
import inspect
import multiprocessing
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine import compare_vllm
from engine.broken_vllm import VLLM, copy
from engine.tiny_engine import configure
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvpop_vllm import supported
from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import write_tiny_model
from kvpop_vllm.vllm_glue import install, plugin
from kvpop_vllm.vllm_glue.ledger import ADDED, EVERY, FALLBACK, FUNCTIONS, LEDGER, REGISTERED
from kvpop_vllm.vllm_glue.run import compile_cache
from kvpop_vllm.vllm_glue.start import contract, fallback

ROOT = Path(__file__).parents[2]


def test_the_installed_vllm_has_all(capsys):
    assert compare_vllm.main(str(VLLM)) == 0
    assert f"{len(FUNCTIONS)} wrapped functions" in capsys.readouterr().out
    assert len(set(contract.imported_names())) > 40


def test_vllm_has_the_architectures_of_all_families():
    from vllm import ModelRegistry

    assert {family.architecture for family in supported.FAMILIES} <= set(ModelRegistry.get_supported_archs())


def test_every_lack_is_found(tmp_path, capsys):
    """Every function and every imported name is found missing where its modules call it something else."""
    functions = {patch.target: patch.target.split(":") for patch in FUNCTIONS}
    relied = [(module, path.split(".")[-1]) for module, path in functions.values()]
    relied += contract.imported_names()
    names = "|".join(sorted({name for _, name in relied} - {"vllm"}, key=len, reverse=True))
    for module in {module for module, _ in relied}:
        source = VLLM.joinpath(*module.split(".")[1:])
        source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
        if not source.is_file():
            assert module in contract.MOVED
            continue
        path = tmp_path / "vllm" / source.relative_to(VLLM)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(rf"\b({names})\b", r"\1_", source.read_text()))
    folder = tmp_path / "vllm"
    functions = list(dict.fromkeys(map(contract.described, FUNCTIONS)))
    assert contract.missing_functions(folder, FUNCTIONS) == functions
    assert set(contract.missing_names(folder)) == {f"{module}.{name}" for module, name in contract.imported_names()}
    assert compare_vllm.main(str(folder)) == 1 and "lacks vllm.engine.arg_utils:" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"^this vLLM lacks .*add_cli_args\(parser\) and \d+ others, .*install a stock"
    ):
        contract.check_functions(folder, FUNCTIONS)
    with pytest.raises(ConfigError, match="^this vLLM lacks "):
        contract.check_imports(folder)
    with pytest.raises(SystemExit, match="give the folder vllm of unpacked sources"):
        compare_vllm.main(str(tmp_path))


def test_a_name_that_moved_is_in_either_module(tmp_path):
    """Which groups layers form is found where each version plans them, and its lack is found."""
    relied = {(module, "get_kv_cache_groups") for module in contract.MOVED}
    assert relied <= set(contract.imported_names())
    (place,) = (module for module, name in relied if contract.defines(VLLM, module, name))
    (other_place,) = {*contract.MOVED} - {place}
    file, moved = (f"{module.removeprefix('vllm.').replace('.', '/')}.py" for module in (place, other_place))
    folder = copy(tmp_path, {file: ("get_kv_cache_groups", "get_groups_of_layers")}) / "vllm"
    assert contract.missing_names(VLLM) == []
    assert contract.missing_names(folder) == sorted(f"{module}.{name}" for module, name in relied)
    code = (folder / moved).read_text() if (folder / moved).exists() else ""
    (folder / moved).unlink(missing_ok=True)  # a link to the installed file
    (folder / moved).write_text(f"{code}\ndef get_kv_cache_groups(vllm_config, kv_cache_spec): ...\n")
    assert contract.missing_names(folder) == []


SPEC = "v1.attention.backend:AttentionBackend.customize_spec"


@pytest.mark.parametrize(
    "now, parameters", [("adjust_spec(cls, spec", ""), ("customize_spec(cls, spec, layer", "(cls, spec)")]
)
def test_a_method_that_vllm_calls_in_another_way_is_found(now, parameters, tmp_path):
    folder = copy(tmp_path, {"v1/attention/backend.py": ("customize_spec(cls, spec", now)}) / "vllm"
    assert compare_vllm.missing_overrides(folder) == [f"vllm.{SPEC}{parameters}"]


@pytest.mark.parametrize("patch", FUNCTIONS, ids=lambda patch: patch.target)
def test_parameters_that_are_relied_on(patch):
    """A relied-on parameter may be neither renamed nor, where it comes by its position, moved; others may be added."""
    names = contract.parameters(VLLM, patch.target)
    leading, named = contract.split(patch.takes)
    assert contract.fits(patch.takes, names) and contract.fits(patch.takes, [*names, "new"])
    assert not contract.fits(patch.takes, None)
    for relied in (*leading, *named):
        assert not contract.fits(patch.takes, [f"{name}_" if name == relied else name for name in names])
    assert not leading or not contract.fits(patch.takes, ["new", *names])


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.2"])
def test_versions_that_are_served(version):
    contract.check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.32.0rc1", "0.34.0", "0.34.0rc1", "0.34.1.dev5+gabc", "dev"])
def test_other_versions(version):
    with pytest.raises(ConfigError, match=re.escape(f"vLLM {version} is not supported: install vllm>=0.32,<0.34")):
        contract.check_version(version)


def test_pip_asks_for_the_same_versions():
    assert f'"vllm{supported.VLLM}"' in (ROOT / "pyproject.toml").read_text()


def their_classmethod(*names):
    scope = {}
    exec(f"def from_cli_args({', '.join(names)}): return 'theirs'", scope)
    return classmethod(scope["from_cli_args"])


def test_functions_of_this_process_are_looked_at_too(monkeypatch):
    """A function that another plugin has removed or replaced is found, and nothing is wrapped then."""
    plugin.register()
    add = EngineArgs.__dict__["add_cli_args"].__func__.__wrapped__
    monkeypatch.setattr(EngineArgs, "add_cli_args", staticmethod(add))
    for broken in (their_classmethod("cls", "namespace"), None):
        if broken is None:
            monkeypatch.delattr(EngineArgs, "from_cli_args")
        else:
            monkeypatch.setattr(EngineArgs, "from_cli_args", broken)
        with pytest.raises(ConfigError, match=r"lacks vllm.engine.arg_utils:EngineArgs.from_cli_args\(cls, args\)"):
            install.install(EVERY)
        assert EngineArgs.add_cli_args is add
    monkeypatch.setattr(EngineArgs, "from_cli_args", their_classmethod("*args", "**kwargs"), raising=False)
    install.install(EVERY)
    assert EngineArgs.__dict__["from_cli_args"].__func__._kvpop_row in LEDGER


@pytest.mark.parametrize("row", LEDGER, ids=lambda row: f"{row.target} {row.wrapper}")
def test_rows_of_the_ledger(row):
    """A wrapper takes what its row says, a row says why it is there, and vLLM has what is registered or changed."""
    module, name = row.wrapper.split(":")
    ours = getattr(importlib.import_module(f"kvpop_vllm.vllm_glue.{module}"), name)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [name for name, parameter in inspect.signature(ours).parameters.items() if parameter.kind not in kinds]
    leading = {ADDED: ["self"], REGISTERED: []}.get(row.kind, ["install"] * bool(row.opens) + ["original"])
    if row.process != FALLBACK and row.kind != ADDED:
        assert named == leading + contract.split(row.takes)[0]
    else:
        assert named[: len(leading)] == leading
    assert row.why and row.goes and row.when in install.CONDITIONS
    module, path = row.target.split(":")
    owner, *inner = path.split(".")
    assert contract.defines(VLLM, module, owner) and not (row.kind == ADDED and contract.parameters(VLLM, row.target))


# Standing aside. Engines and servers do so in test_fail_safe.py.


@pytest.fixture
def warnings(monkeypatch):
    """Texts of warnings, in a process whose plugin may stand aside."""
    texts = []
    monkeypatch.setattr(fallback.logger, "warning", lambda text, *values: texts.append(text % values))
    monkeypatch.setattr(fallback, "reason", None)
    return texts


@pytest.mark.parametrize(
    "command",
    [["vllm", "serve", "m", "--kv-policy", "x"], ["/bin/vllm", "bench", "latency", "--kv_budget=64"]],
    ids=str,
)
def test_vllms_command_ends_if_it_has_a_flag(command, warnings, monkeypatch):
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="^kvpop: error: --kv-policy cannot be served: why$"):
        fallback.stand_aside("why", lambda: None)
    assert warnings == []


@pytest.mark.parametrize(
    "command", [["vllm", "serve", "m", "--kv-cache-dtype", "auto"], ["mine.py", "--kv-policy", "x"]]
)
def test_other_commands_go_on(command, warnings, monkeypatch):
    monkeypatch.setattr(sys, "argv", command)
    fallback.stand_aside("why", lambda: None)
    assert warnings == ["kvpop_vllm does nothing: why"] and fallback.reason == "why"


def test_child_processes_do_not_warn_again(warnings, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    fallback.stand_aside("why", lambda: None)
    assert warnings == []


def test_a_server_starts_though_nothing_can_be_refused(warnings):
    def guard():
        raise ImportError("no VllmConfig")

    fallback.stand_aside("why", guard)
    assert warnings[1:] == ["kv_policy in additional_config has no effect, and cannot be refused: no VllmConfig"]


def restored(self, state):
    self.__dict__.update(state, restored=True)


@pytest.mark.parametrize("theirs", [None, restored], ids=["Python's", "vLLM's own"])
def test_a_config_that_comes_by_pickle_is_refused(theirs, monkeypatch):
    """Engine cores and workers get it in this way, and call no constructor. A method of vLLM's own still restores it."""
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(VllmConfig, name, getattr(VllmConfig, name, None), raising=False)
    monkeypatch.delattr(VllmConfig, "__setstate__")
    if theirs is not None:
        VllmConfig.__setstate__ = theirs
    monkeypatch.setattr(fallback, "reason", "why")
    stock, asking = (VllmConfig.__new__(VllmConfig) for _ in range(2))
    stock.additional_config, asking.additional_config = {"other": 1}, {"kv_policy": {"policy": "h2o"}}
    sent = pickle.dumps(stock), pickle.dumps(asking)
    install.install(FALLBACK)
    config = pickle.loads(sent[0])
    assert config.additional_config == {"other": 1} and hasattr(config, "restored") == (theirs is not None)
    with pytest.raises(ConfigError, match="^--kv-policy cannot be served: why$"):
        pickle.loads(sent[1])


def test_a_stock_server_starts_next_to_a_plugin_that_changed_a_target(warnings, monkeypatch, tiny_model):
    """Rows that are put in place after the plugin was loaded cannot stop it either; a policy is refused."""
    from vllm.entrypoints.generate import api_router

    monkeypatch.setitem(sys.modules, install.HTTP_SERVER, sys)
    monkeypatch.setattr(api_router, "init_generate_state", lambda client: None)
    assert configure(tiny_model("qwen3"), None).additional_config == {}
    lack = "this vLLM lacks vllm.entrypoints.generate.api_router:init_generate_state(engine_client, state, args)"
    assert warnings == [
        f"kvpop_vllm does nothing: {lack}, which kvpop_vllm relies on: install a stock vllm>=0.32,<0.34"
    ]
    with pytest.raises(ConfigError, match=re.escape(lack)):
        configure(tiny_model("qwen3"), {"policy": "h2o", "budget": 64})


# vLLM 0.33, and torch's private class.


def test_the_cpu_platform_may_ask_for_cache_dtypes(tmp_path):
    """VLLM 0.33 asks the backend class of a CPU what it takes before it returns its path."""
    from vllm.config import set_current_vllm_config

    model = write_tiny_model(tmp_path / "qwen3", "qwen3")
    with set_current_vllm_config(configure(model, {"policy": "streaming-llm", "budget": 64})):
        backend = AttentionBackendEnum.CPU_ATTN.get_class()
        assert backend.policy.retention.budget == 64
        assert [backend.supports_kv_cache_dtype(dtype) for dtype in (None, "auto", "bfloat16", "fp8")] == [True] * 3 + [
            False
        ]
    with set_current_vllm_config(configure(model, None)):
        assert AttentionBackendEnum.CPU_ATTN.get_class().__name__ == "CPUAttentionBackend"


MODEL = SimpleNamespace(vllm_config=SimpleNamespace(additional_config={"kv_policy": {}}))


def test_torchs_artefact_has_the_method_while_it_is_loaded():
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as artefact

    assert compile_cache.try_load(lambda model: hasattr(artefact, compile_cache._HOOK), MODEL)
    assert not hasattr(artefact, compile_cache._HOOK)


@pytest.mark.parametrize("replacement", [None, int, 3], ids=str)
def test_another_class_of_torch_costs_a_warning(replacement, monkeypatch):
    """Without the private class, or with one that takes no methods, vLLM's own function runs as it is."""
    import torch._dynamo.aot_compile_types as types

    lines = []
    monkeypatch.setattr(compile_cache.logger, "warning_once", lambda text, *values: lines.append(text % values))
    if replacement is None:
        monkeypatch.delattr(types, "BundledAOTAutogradSerializableCallable")
    else:
        monkeypatch.setattr(types, "BundledAOTAutogradSerializableCallable", replacement)
    assert compile_cache.try_load(lambda model: "as it is", MODEL) == "as it is"
    (line,) = lines
    assert line.startswith("this torch is not the expected one, so that models are compiled at every start: ")
