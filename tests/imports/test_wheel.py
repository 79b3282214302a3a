"""The wheel holds the package, the inspect page, the Triton kernels and the entry points, and nothing else of the repository."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = "kvpop_vllm", "triton_kernels", "csrc", "tests/imports", "benchmarks"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Wheel of a copy of the repository, built where torch is missing, and so without the C++ extension."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "results"))
    code = "import sys; sys.modules['torch'] = None; from setuptools import build_meta; build_meta.build_wheel('dist')"
    outcome = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert "kvpop_vllm._C was not built: torch is not installed in the build environment" in outcome.stdout
    (path,) = (source / "dist").iterdir()
    return path


def test_files(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kvpop_vllm").rglob("*.py")}
    modules |= {f"kvpop_vllm/kernels/triton/{path.name}" for path in (ROOT / "triton_kernels").glob("*.py")}
    modules |= {f"kvpop_vllm/inspect_page/{name}" for name in ("index.html", "inspect.css", "inspect.js")}
    modules |= {"kvpop_vllm/calibrate/text.jsonl", "kvpop_vllm/calibrate/text.LICENSE"}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == modules
