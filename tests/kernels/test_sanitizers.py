"""`make sanitize` passes, its library is sanitized, and it fails where sanitizers are not available."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from kernels.sanitized import EXTENSION, ROOT

CALLS = b"__asan_loadN", b"__asan_storeN", b"__ubsan_handle_add_overflow_abort", b"__ubsan_handle_type_mismatch"


def make_sanitize(*arguments):
    """Run `make sanitize` with this Python, without installing and without options of an outer ``make``."""
    outer = ("MAKEFLAGS", "MFLAGS", "PYTEST_ARGS", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "sanitize", f"BIN={Path(sys.executable).parent}", "-o", ".venv/.package", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_make_sanitize():
    """The run is clean, and the sanitized library calls functions that an ordinary one does not."""
    done = make_sanitize()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout
    ordinary = Path(find_spec("kvpop_vllm._C").origin)
    for name in CALLS:
        assert name in EXTENSION.read_bytes() and name not in ordinary.read_bytes(), name


def test_compiler_without_sanitizers_is_named():
    done = make_sanitize("CXX=false", "-W", "setup.py")
    assert done.returncode and "false cannot link with AddressSanitizer and UBSan" in done.stderr
