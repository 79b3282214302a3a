"""Runner of sanitized_cases.py with the extension that ``make sanitize`` builds.

The extension is built with AddressSanitizer and UBSan. The script starts pytest with the sanitizers' runtime;
there, as a plugin, this module puts that extension in the place of ``kvpop_vllm._C``.
"""

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "build/sanitized/kvpop_vllm" / f"_C{EXTENSION_SUFFIXES[0]}"


def runtime(extension: Path = EXTENSION) -> list[str]:
    """Return the libraries to load before all others.

    They are the runtimes that the extension is linked with, and the C++ library, whose exceptions
    AddressSanitizer looks for when it starts.

    Raises:
        SystemExit: the extension is not linked with the runtimes.
    """
    linked = subprocess.run(["ldd", extension], capture_output=True, text=True, check=True).stdout
    paths = [line.split()[2] for line in linked.splitlines() if " => /" in line]
    runtimes = [path for name in ("libasan.", "libubsan.", "libstdc++.") for path in paths if name in path]
    if len(runtimes) != 3:
        raise SystemExit(f"{extension} is not linked with AddressSanitizer and UBSan: {linked}")
    return runtimes


def main() -> None:
    """Run pytest with the arguments of the command line."""
    environment = os.environ | {
        "LD_PRELOAD": ":".join(runtime()),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    # Reports are not written by Python, and pytest must not capture them.
    plugins = [f"-p{name}" for name in ("kernels.sanitized", "no:faulthandler", "no:cacheprovider")]
    command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", *plugins, "tests/kernels/sanitized_cases.py"]
    os.chdir(ROOT)
    os.execve(sys.executable, command + sys.argv[1:], environment)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Load the sanitized extension before any test module or conftest imports ``kvpop_vllm._C``."""
    import torch  # noqa: F401  (the extension's libraries)

    import kvpop_vllm

    assert Path(kvpop_vllm.__file__).parents[1] == ROOT, f"{kvpop_vllm.__file__} is not the package in {ROOT}"
    spec = importlib.util.spec_from_file_location("kvpop_vllm._C", EXTENSION)
    sys.modules[spec.name] = kvpop_vllm._C = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kvpop_vllm._C)


if __name__ == "__main__":
    main()
