"""For all tests."""

from __future__ import annotations

import os

LONGEST_FIRST = (
    "kernels/test_sanitizers.py",
    "kernels/test_decode_step.py",
    "kernels/test_triton_compiled.py",
    "kernels/test_triton_interpreted.py",
)
"""Modules that would leave other workers idle if they came last."""


def pytest_collection_modifyitems(items):
    """Sorts them to the front; all others stay in order."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST_FIRST))


if os.environ.get("TRITON_INTERPRET") == "1":
    from kernels.quicker_interpreter import quicken

    quicken()
