"""``kvpop serve`` and ``kvpop doctor``."""

import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from vllm.model_executor.models import registry

from kvpop_vllm import _C, __version__, cli
from kvpop_vllm.calibration.shares import SIZES, Calibration
from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.supported import TRANSFORMERS
from kvpop_vllm.testing import write_mixed_model, write_tiny_model
from kvpop_vllm.vllm_glue.start import contract, doctor, fallback

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    """Have the log level that `kvpop doctor` sets for its process end with the test."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")  # so that it is restored
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


def without_vllm(package):
    raise metadata.PackageNotFoundError(package)


LACKING = [
    ("version", without_vllm, f"vLLM is not installed for {sys.executable}: install vllm>=0.32,<0.34 there"),
    ("version", lambda package: "0.31.0", "vLLM 0.31.0 is not supported: install vllm>=0.32,<0.34"),
    (
        "entry_points",
        lambda group: (),
        "vLLM does not find the plugin, since kvpop_vllm is not installed: run pip install in its folder",
    ),
]
PLUGINS = [("", "''"), ("other,kvpop_two", "'other,kvpop_two'")]


@pytest.mark.parametrize("name, instead, message", LACKING)
def test_neither_begins_without_the_plugin(name, instead, message, monkeypatch, capsys):
    monkeypatch.setattr(metadata, name, instead)
    monkeypatch.setattr(os, "execv", lambda *command: pytest.fail("vLLM would serve"))
    assert cli.main(["serve", "m"]) == 2
    assert capsys.readouterr().err == f"kvpop: {message}\n"
    assert cli.main(["doctor"]) == 1
    assert f"! plugin       {message}\n" in capsys.readouterr().out


@pytest.mark.parametrize("allowed, shown", PLUGINS)
def test_neither_begins_where_plugins_are_left_out(allowed, shown, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    message = f"VLLM_PLUGINS={shown} leaves the plugin out: add kvpop to it, or unset it"
    assert cli.main(["serve", "m"]) == 2
    assert capsys.readouterr().err == f"kvpop: {message}\n"
    assert cli.main(["doctor"]) == 1
    assert f"! plugin       {message}\n" in capsys.readouterr().out


@pytest.mark.parametrize("allowed", ["kvpop", "other,kvpop"])
def test_plugins_may_be_named(allowed, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    doctor.check_installed()


def test_there_is_a_command_vllm(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "kvpop")])
    assert doctor.vllm_command() == str(Path(sys.executable).with_name("vllm"))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=f"^there is no command vllm in {tmp_path}: install vllm"):
        doctor.vllm_command()


def test_options_and_signals_reach_vllm(tmp_path):
    """`kvpop serve` becomes the ``vllm`` next to it: the same process, with the arguments as they were."""
    kvpop, vllm = tmp_path / "kvpop", tmp_path / "vllm"
    kvpop.write_text(f"#!{sys.executable}\nimport sys\nfrom kvpop_vllm.cli import main\nsys.exit(main())\n")
    listens = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    vllm.write_text(
        f"#!{sys.executable}\nimport os, signal, sys, time\n{listens}\nprint(os.getpid(), sys.argv[1:], flush=True)\ntime.sleep(99)\n"
    )
    for file in (kvpop, vllm):
        file.chmod(0o755)
    options = ["M", "--kv-policy", "h2o", "--kv_budget=64", "--help", "--", "-x", "", "a b", '{"a": "*"}']
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([kvpop, "serve", *options], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == f"{process.pid} {['serve', *options]}\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7


def lines(capsys) -> dict[str, str]:
    """Return the printed lines by their topics, the lines of a topic as one text, with the mark of what is wrong."""
    printed, texts = capsys.readouterr().out.splitlines(), {}
    for line in printed[:-1]:
        topic, text = line[2:14].strip(), line[:2].strip() + line[15:]
        texts[topic] = f"{texts[topic]}\n{text}" if topic in texts else text
    return texts | {"end": printed[-1]}


def test_doctor(capsys):
    assert cli.main(["doctor"]) == 0
    report = lines(capsys)
    versions = {name: report[name] for name in ("vLLM", "torch", "triton", "transformers")}
    assert versions == {name: metadata.version(name.lower()) for name in versions}
    assert report["kvpop"] == f"{__version__} in {ROOT}" and sys.executable in report["Python"]
    assert report["CPU"] and report["Triton"] == "no GPU, so not used"
    assert report["C++ kernels"] == f"{_C.current_isa()} of {', '.join(_C.isa_levels())}"
    released = metadata.version("vllm").removesuffix("+cpu")
    assert re.match(rf"loaded by vLLM {re.escape(released)}(, next to |$)", report["plugin"])
    assert report["end"] == "all right" and "policy" not in report


def test_doctor_finds_what_is_wrong(capsys, monkeypatch):
    def not_built():
        raise ImportError("kvpop_vllm._C is not usable here")

    monkeypatch.setattr(dispatch, "load_extension", not_built)
    monkeypatch.setattr(fallback, "reason", "why")
    assert cli.main(["doctor"]) == 1
    report = lines(capsys)
    assert report["plugin"] == "!does nothing: why"
    assert report["C++ kernels"] == "!kvpop_vllm._C is not usable here; on a CPU the slow reference kernels serve"
    assert report["end"] == "2 wrong, see the lines with !"


@pytest.mark.parametrize("installed", ["5.15.9", "5.25.0", None])
def test_doctor_finds_an_unsupported_transformers(installed, capsys, monkeypatch):
    """The plugin acts with it, and training, compaction and the cache for transformers refuse it."""
    of_others = metadata.version

    def version(package):
        if package != "transformers":
            return of_others(package)
        return installed or without_vllm(package)

    monkeypatch.setattr(metadata, "version", version)
    assert cli.main(["doctor"]) == 1
    printed = lines(capsys)
    lacking = "not installed" if installed is None else f"transformers {installed} is not supported"
    assert printed["transformers"] == f"!{lacking}: install transformers{TRANSFORMERS}"
    assert printed["end"] == "1 wrong, see the lines with !"


def test_doctor_finds_what_a_policy_would_lack(capsys, monkeypatch):
    monkeypatch.setattr(contract, "imported_names", lambda: [("vllm.config", "Gone")])
    assert cli.main(["doctor"]) == 1
    assert lines(capsys)["plugin"].startswith("!this vLLM lacks vllm.config.Gone, which kvpop_vllm relies on")


def test_doctor_finds_that_another_plugin_fails(capsys, monkeypatch):
    import vllm.plugins

    def fails():
        raise RuntimeError("theirs")

    monkeypatch.setattr(vllm.plugins, "load_general_plugins", fails)
    assert cli.main(["doctor"]) == 1
    assert lines(capsys)["plugin"] == "!vLLM cannot load its plugins: RuntimeError: theirs"


ASKED = [
    ([], 0, "none asked for (--kv-policy): a dense cache"),
    (
        ["--kv-policy", "streaming-llm", "--kv-budget", "64"],
        0,
        "--kv-policy streaming-llm: 64 tokens per KV head (4 sinks, window 59, 1 long-range)\n"
        "a prompt that goes on from an earlier request costs its new tokens (--no-enable-prefix-caching turns it off)",
    ),
    (["--kv-policy", "streaming-llm"], 1, "!refused: --kv-policy streaming-llm needs a budget: give --kv-budget or --kv-compression"),
    (["--kv-policy", "h2o", "--kv-budget", "64", "--block-size", "24"], 1, "!refused: --kv-policy cannot be combined with --block-size 24: use a multiple of 16"),
]  # fmt: skip


@pytest.mark.parametrize("options, code, text", ASKED)
def test_doctor_says_what_a_policy_would_keep(options, code, text, model, capsys, monkeypatch):
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    tiny = ["--skip-tokenizer-init", "--max_model_len", "256", "--port", "80"]
    assert cli.main(["doctor", str(model), *tiny, *options]) == code
    report = lines(capsys)
    assert report["policy"] == text
    assert "model" not in report if code else report["model"] == f"Qwen3ForCausalLM, {model}"


def test_doctor_names_the_layers(capsys, monkeypatch, tmp_path):
    """The layers that a policy acts on, and what the others are."""
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    folder = write_mixed_model(tmp_path, "gemma3_text")
    options = ["--kv-policy", "streaming-llm", "--kv-budget", "64", "--skip-tokenizer-init", "--max-model-len", "256"]
    assert cli.main(["doctor", str(folder), *options]) == 0
    acts = "it acts on 2 of 6 layers, those with full attention (2, 5); 4 of sliding_attention are as without a policy"
    assert acts in lines(capsys)["policy"].splitlines()


@pytest.mark.parametrize("calibrated", [False, True])
def test_doctor_names_what_auto_is(calibrated, model, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    shape = ModelShape.of(model, 256)
    sizes = {name: getattr(shape, name) for name in SIZES}
    calibration = Calibration(**sizes, rope=shape.rope, unit="head", shares=((1.5, 0.5), (0.5, 1.5)), windows={"h2o": 0.25}, policy="h2o", budget=64)  # fmt: skip
    calibration.write(tmp_path)
    options = ["--kv-policy", "auto", *(["--kv-calibration", str(tmp_path)] if calibrated else ["--kv-budget", "64"])]
    assert cli.main(["doctor", str(model), "--skip-tokenizer-init", "--max_model_len", "256", *options]) == 0
    printed = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if "policy " in line[:14]]
    if calibrated:
        assert printed[0] == f"--kv-policy auto is h2o, as {tmp_path} recommends"
        roles = "64 tokens per KV head (0 sinks, window 16, 48 long-range)"
        assert printed[1] == f"--kv-policy h2o: {roles} in the mean, shared by the calibration's shares"
    else:
        assert printed[0].startswith("--kv-policy auto is streaming-llm, which needs no calibration")


@pytest.mark.parametrize(
    "policy, end",
    [("h2o", None), ("tova", ""), ("streaming-llm", ", and are not for this policy: heads have equal ones")],
)
def test_doctor_names_the_policy_that_decided_about_shares(policy, end, model, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    shape = ModelShape.of(model, 256)
    sizes = {name: getattr(shape, name) for name in SIZES}
    content = {"unit": "head", "shares": ((1.5, 0.5), (0.5, 1.5)), "windows": {}, "policy": "h2o", "budget": 64}
    Calibration(**sizes, rope=shape.rope, **content, decided_by="h2o").write(tmp_path)
    options = ["--kv-policy", policy, "--kv-calibration", str(tmp_path), "--kv-budget", "64", "--max_model_len", "256"]
    assert cli.main(["doctor", str(model), "--skip-tokenizer-init", *options]) == 0
    output = capsys.readouterr().out
    line = f"shares of {tmp_path} were measured under h2o{end}\n"
    assert line in output if end is not None else "were measured under" not in output
    assert ("shared by the calibration's shares" in output) == (policy != "streaming-llm")


def test_doctor_of_a_model_that_is_not_there(capsys, tmp_path):
    assert cli.main(["doctor", str(tmp_path / "none"), "--kv-policy", "h2o", "--kv-budget", "64"]) == 1
    assert lines(capsys)["policy"].startswith("!refused: ")


def test_options_that_vllm_does_not_know(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "m", "--kv-bugdet", "64"])
    assert ended.value.code == 2 and "--kv-bugdet" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--help"])
    assert ended.value.code == 0 and "print versions" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    output = capsys.readouterr().out
    assert "serve" in output and "doctor" in output
