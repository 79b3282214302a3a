"""Names of the hub where a folder is taken, over a laid-out cache and over a server on this machine."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scorers.hub_server import commit_of, lay_out, serving

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hub import config_folder, local_folder, model_folder, name_of
from kvpop_vllm.scorers.checkpoint import read_config
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

RUN = """
import json, sys
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hub import local_folder
try:
    print(json.loads((local_folder(sys.argv[1]) / "kvpop_config.json").read_text())["topk"])
except ConfigError as error:
    sys.exit(f"kvpop: {error}")
"""
"""Program that prints k of a scorer's folder."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def revisions(base, tmp_path_factory):
    """Return two revisions of a scorer, each with a program that must not be downloaded."""
    root = tmp_path_factory.mktemp("scorers")
    folders = {name: write_random_scorer(root / name, base, topk=k) for name, k in (("main", 44), ("v2", 33))}
    for folder in folders.values():
        (folder / "modeling.py").write_text("raise SystemExit")
    return folders


def read(scorer, home, **environment) -> subprocess.CompletedProcess:
    """Print k of a scorer, in a process with a hub's cache of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HOME": str(home), **environment}
    return subprocess.run([sys.executable, "-c", RUN, scorer], env=env, capture_output=True, text=True, timeout=120)


def refused(run: subprocess.CompletedProcess) -> str:
    """Return the only line on stderr of a command that failed."""
    assert run.returncode == 1, run.stdout + run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("kvpop: ")]
    return line


def test_the_cache_serves_without_a_network(revisions, tmp_path):
    lay_out(tmp_path / "hub", "owner/name", revisions)
    offline = {"HF_HUB_OFFLINE": "1"}
    for name, expected in (("owner/name", 44), ("owner/name@v2", 33), (f"owner/name@{commit_of('owner/name@v2')}", 33)):
        run = read(name, tmp_path, **offline)
        assert run.stdout == f"{expected}\n", run.stderr
    for name in ("owner/other", "owner/name@v3"):
        line = refused(read(name, tmp_path, **offline))
        assert f"{name} is no folder here, and the hub cannot be reached, nor does its cache hold it" in line


def test_a_server_as_endpoint(revisions, tmp_path):
    with serving({"owner/name": revisions}) as (address, requested):
        run = read("owner/name@v2", tmp_path, HF_ENDPOINT=address)
        assert run.stdout == "33\n", run.stderr
        assert any("/resolve/" in path for path in requested)
        assert not any(path.endswith(".py") for path in requested), "code is downloaded"
        for name in ("owner/other", "owner/name@v3"):
            line = refused(read(name, tmp_path, HF_ENDPOINT=address))
            assert f"{name} is no folder here, and the hub has none of this name and revision" in line
        proxied = {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": address}  # which tunnels nothing
        line = refused(read("owner/other", tmp_path, **proxied))
        assert "owner/other is no folder here, and the hub cannot be reached" in line
    run = read("owner/name@v2", tmp_path, HF_ENDPOINT=address, HF_HUB_ETAG_TIMEOUT="2")  # which is gone
    assert run.stdout == "33\n", "the cache is used where the hub cannot be reached"


def test_an_existing_folder_wins(revisions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").symlink_to(revisions["main"])
    assert local_folder("owner/name").resolve() == revisions["main"].resolve()
    for path in ("nowhere", "a/b/c", "/nowhere/x", "./a/b", "../x"):
        assert str(local_folder(path)) == os.path.normpath(path)


def test_commands_take_names_of_models(base, tmp_path, monkeypatch, run_kvpop):
    """A name becomes the folder in the hub's cache; a path stays as it is."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lay_out(tmp_path / "hub", "owner/model", {"main": base})
    size = "--kv-memory 1GiB --max-model-len 4096 --budget 512".split()
    by_name, by_path = (run_kvpop("plan", "--model", model, *size) for model in ("owner/model", str(base)))
    assert by_name == by_path and by_name[0] == 0, by_name
    assert run_kvpop("init-scorer", "owner/model", str(tmp_path / "scorer"), "--window", "8")[0] == 0
    assert read_config(tmp_path / "scorer").num_layers == 2
    assert run_kvpop("export", "owner/model", str(tmp_path / "scorer"), str(tmp_path / "full"))[0] == 0
    for words in (
        f"import {tmp_path / 'scorer'} {tmp_path / 'imported'} --model owner/absent",
        "distill texts --model owner/absent --out y",
        "distill shares --model owner/absent --out y",
        "eval --model owner/absent",
    ):
        status, _, errors = run_kvpop(*words.split())
        assert status == 2 and "is no folder here" not in errors, (words, errors)
    for words in (
        "plan --kv-memory 1GiB --model owner/absent",
        "eval --data x --model owner/absent",
        f"eval --data x --model {base} --teacher owner/absent",
        "distill --data x --out y --model owner/absent",
        "calibrate owner/absent --out y",
        "compact owner/absent --data x --out y",
        "train-compactor owner/absent --data x --out y",
    ):
        status, _, errors = run_kvpop(*words.split())
        assert status == 2 and "owner/absent is no folder here, and the hub cannot be reached" in errors, (
            words,
            errors,
        )


@pytest.mark.parametrize("reader", ["cartridge", "import", "inspect-checkpoint"])
def test_every_reader_of_folders_takes_names(reader, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from kvpop_vllm.compaction.cartridge import read_cartridge
    from kvpop_vllm.scorers.inspect_checkpoint import inspect_checkpoint
    from kvpop_vllm.scorers.published import import_gates

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    read = {
        "cartridge": read_cartridge,
        "import": lambda name: import_gates(name, tmp_path / "out"),
        "inspect-checkpoint": lambda name: inspect_checkpoint(name, tmp_path / "map.json"),
    }[reader]
    with pytest.raises(ConfigError, match="owner/absent is no folder here, and the hub cannot be reached") as error:
        read("owner/absent")
    assert "\n" not in str(error.value)
    empty = tmp_path / "empty"
    empty.mkdir()
    lay_out(tmp_path, "owner/present", {"main": empty})
    with pytest.raises(ConfigError, match="models--owner--present"):
        read("owner/present")


def test_a_model_is_fetched_once_and_only_with_weights_it_can_load(base, tmp_path, monkeypatch):
    """Copies of weights stay on the hub, and a model that has no other weights than pickles is refused."""
    from huggingface_hub import constants

    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    for copy in ("consolidated.safetensors", "original/model.safetensors", "onnx/model.safetensors"):
        (folder / copy).parent.mkdir(exist_ok=True)
        (folder / copy).write_bytes(b"copy")
    pickles = tmp_path / "pickles"
    shutil.copytree(base, pickles, ignore=shutil.ignore_patterns("*.safetensors"))
    (pickles / "pytorch_model.bin").write_bytes(b"weights")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving({"owner/model": {"main": folder}, "owner/pickles": {"main": pickles}}) as (address, requested):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        assert {path.name for path in Path(config_folder("owner/model")).iterdir()} >= {"config.json"}
        assert not any(".safetensors" in path for path in requested), "a command that reads configs fetches weights"
        fetched = {
            path.relative_to(folder_of).as_posix()
            for folder_of in [Path(model_folder("owner/model"))]
            for path in folder_of.rglob("*")
        }
        assert "model.safetensors" in fetched and not any("/" in name or "consolidated" in name for name in fetched)
        with pytest.raises(
            ConfigError, match="owner/pickles has no weights in the format of safetensors on the hub, or its cache"
        ):
            model_folder("owner/pickles")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    import huggingface_hub

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ConfigError, match="cannot be kept in the hub's cache .*No space.*: make room, or set HF_HOME"):
        local_folder("owner/name")


def test_a_name_that_the_hub_cannot_have_is_a_path():
    assert str(local_folder("runs/my--model")) == "runs/my--model"


def test_runs_name_a_snapshot_by_its_commit(tmp_path):
    """Caches in two places hold the same model."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    for home in ("/a/hub", "/b"):
        assert name_of(f"{home}/models--Some-Owner--A--name/snapshots/{commit}") == f"Some-Owner/A--name@{commit}"
    assert name_of("models/mine") == "models/mine" and name_of(tmp_path) == str(tmp_path)
