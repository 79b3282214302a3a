"""The machine that `make gpu-rehearse` pretends: its Python environment, and the libraries of its GPU.

Its packages are installed in ``build/gpu/machine`` without their dependencies and so without NVIDIA's libraries. In
place of these stand the libraries of ``pretend/``.

There are two machines. One has no vLLM: it takes vLLM 0.32 from the bundle. The other, with ``--vllm 0.33``, has vLLM
0.33 installed with the torch that this requires, and uses no bundle. Run as a script, this makes the environment.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.pretend.build import build

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
BUILD = ROOT / "build" / "gpu"
HEADERS = BUILD / "headers"
CUDA_HEADERS = "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"
PACKAGES = {"0.32": ("machine.txt",), "0.33": ("machine.txt", "packages.txt", "machine-0.33.txt")}
"""Lists of a machine's packages by its version of vLLM. A package's last line counts. The first list has no vLLM."""


class Machine:
    """Machine with a pretended GPU.

    Args:
        vllm: release of vLLM, a key of :data:`PACKAGES`.

    Attributes:
        bundled: True if vLLM comes with the bundle.
        packages: pinned packages, one a line, as pip reads them.
        python: interpreter of the environment.
        libraries: folder of the pretended device's libraries.
        rehearsal: folder of results, records, caches and the home of the last rehearsal.
    """

    def __init__(self, vllm: str):
        self.bundled = len(PACKAGES[vllm]) == 1
        suffix = "" if self.bundled else f"-{vllm}"
        self.folder, self.libraries, self.rehearsal = (
            BUILD / f"{name}{suffix}" for name in ("machine", "pretend", "rehearsal")
        )
        lines = [line for name in PACKAGES[vllm] for line in (HERE / name).read_text().splitlines()]
        pins = {line.split("==")[0]: line for line in lines if line and not line.startswith("#")}
        self.packages = "\n".join(pins.values()) + "\n"
        self.python = self.folder / "bin" / "python"
        self.site = self.folder / "lib" / "python3.12" / "site-packages"
        self.vllm = (BUILD / "site" if self.bundled else self.site) / "vllm"

    def make(self, python312: str) -> None:
        """Make the environment by a Python 3.12, unless it is there with these packages."""
        mark = self.folder / ".packages"
        if mark.exists() and mark.read_text() == self.packages:
            return
        check_python(python312)
        size = "0.8 GB" if self.bundled else "1.2 GB"
        print(
            f"[gpu-rehearse] the machine's packages in {self.folder.relative_to(ROOT)}, {size} to download", flush=True
        )
        shutil.rmtree(self.folder, ignore_errors=True)
        subprocess.run([python312, "-m", "venv", self.folder], check=True)
        listed = self.folder / "packages.txt"
        listed.write_text(self.packages)
        self.install("-r", str(listed))
        mark.write_text(self.packages)

    def install(self, *arguments: str) -> None:
        """Install packages without their dependencies by the machine's pip."""
        pip = [self.python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, *arguments], check=True)

    def make_libraries(self) -> None:
        """Build the pretended device's libraries from the symbols of torch and vLLM, unless they are there for both."""
        if not self.vllm.exists():
            sys.exit("[gpu-rehearse] build/gpu/site has no vLLM: remove build/gpu/bundle and run `make gpu-bundle`")
        sources = sorted((HERE / "pretend").glob("*.[chp]*"))
        digest = hashlib.sha256(self.packages.encode())
        for path in (*sources, HERE / "packages.txt"):
            digest.update(path.read_bytes())
        mark = self.libraries / ".built"
        if mark.exists() and mark.read_text() == digest.hexdigest():
            return
        if not HEADERS.exists():
            self.install("--target", str(HEADERS), *CUDA_HEADERS)
        torch, triton = self.site / "torch" / "lib", self.site / "triton" / "backends" / "nvidia"
        texts = [triton / "driver.c", triton / "driver.py", torch / "libc10_cuda.so"]
        objects = [*torch.glob("*.so*"), *self.vllm.rglob("*.so")]
        build(self.libraries, objects, texts, [HEADERS / "nvidia" / "cu13" / "include"])
        mark.write_text(digest.hexdigest())

    def environment(self, out: Path, records: Path) -> dict[str, str]:
        """Return the environment in which the pretended device is found; no cache is read but those of rehearsals."""
        left_out = "TRITON_", "VLLM_", "KVPOP_", "MAKE", "XDG_"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        return clean | {
            "HOME": str(self.rehearsal / "home"),
            "KVPOP_GPU_WORK": str(self.rehearsal / "work"),
            "LD_LIBRARY_PATH": str(self.libraries),
            "OMP_NUM_THREADS": "1",
            "OUT": str(out),
            "PRETEND_RECORDS": str(records),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(HERE / "pretend"),
            "TRITON_LIBCUDA_PATH": str(self.libraries),
        }


def check_python(python312: str) -> None:
    """End with a line if an interpreter is no Python 3.12."""
    version = "import sys; sys.exit(sys.version_info[:2] != (3, 12))"
    if not shutil.which(python312) or subprocess.run([python312, "-c", version], capture_output=True).returncode:
        sys.exit(f"{python312} is no Python 3.12, which the GPU machine has: make PYTHON312=/path/to/python3.12 ...")


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that name a machine."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", choices=list(PACKAGES), default="0.32", help="vLLM of the machine (default: 0.32)")
    parser.add_argument("--python312", default="python3.12", help="interpreter of the machine: Python 3.12")
    return parser


if __name__ == "__main__":
    options = parser_of(__doc__).parse_args()
    Machine(options.vllm).make(options.python312)
