"""The machines that a rehearsal pretends: which packages they have, and what is refused before any is downloaded."""

import subprocess
from pathlib import Path

import pytest
from gpu import machine
from packaging.specifiers import SpecifierSet

from kvpop_vllm import supported

ROOT = Path(__file__).parents[2]


def packages_of(release: str) -> dict[str, str]:
    """Return the packages of a machine, with their versions."""
    return dict(line.split("==") for line in machine.Machine(release).packages.splitlines())


def test_packages():
    """A machine with vLLM installed has all that the other has and the bundle brings, in the versions of its vLLM."""
    bare, installed = map(packages_of, machine.PACKAGES)
    assert "vllm" not in bare and bare["torch"] == "2.11.0" and bare["triton"] == "3.6.0"
    assert {name: installed[name] for name in ("vllm", "torch", "triton")} == {
        "vllm": "0.33.0", "torch": "2.14.0", "triton": "3.8.0",
    }  # fmt: skip
    assert bare.keys() < installed.keys() and {"fastapi", "pydantic", "xgrammar"} <= installed.keys() - bare.keys()
    assert installed["vllm"] in SpecifierSet(supported.VLLM)
    assert all(packages["transformers"] in SpecifierSet(supported.TRANSFORMERS) for packages in (bare, installed))


@pytest.mark.parametrize("script", [None, "exit 1"])
def test_only_python_312_makes_a_machine(tmp_path, monkeypatch, script):
    """An interpreter that is missing or of another version is refused before the old environment is removed."""
    monkeypatch.setattr(machine, "BUILD", tmp_path)
    interpreter = tmp_path / "python"
    if script:
        interpreter.write_text(f"#!/bin/sh\n{script}\n")
        interpreter.chmod(0o755)
    pretended = machine.Machine("0.33")
    pretended.folder.mkdir()
    (pretended.folder / ".packages").write_text("of another list")
    with pytest.raises(SystemExit, match="python is no Python 3.12, .*: make PYTHON312=/path/to/python3.12"):
        pretended.make(str(interpreter))
    assert (pretended.folder / ".packages").exists()


def test_a_bundle_of_another_vllm_is_refused():
    outcome = subprocess.run(["make", "gpu-bundle", "VLLM=0.33"], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode and outcome.stderr.startswith("the bundle is of vLLM 0.32: leave VLLM out\n")
