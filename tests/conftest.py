"""For all tests."""

from __future__ import annotations

import os
import types

LONGEST_FIRST = (
    "kernels/test_sanitizers.py",
    "kernels/test_decode_step.py",
    "kernels/test_triton_training.py",
    "kernels/test_triton_serving.py",
    "kernels/test_triton_prefill.py",
)
"""Modules that would leave other workers idle if they came last."""


def pytest_collection_modifyitems(items):
    """Sorts them to the front; all others stay in order."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST_FIRST))


def quicker_interpreter() -> None:
    """Triton's interpreter exchanges the functions of its language before every call of a kernel's own functions, though the launch has done
    so: a third of all its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    exchange, done = interpreter._patch_lang, types.SimpleNamespace(restore=lambda: None)

    def exchange_once(fn):
        seen = [module for module in fn.__globals__.values() if module is tl or module is tl.core]
        return exchange(fn) if not seen or any(tl.core.is_builtin(module.load) for module in seen) else done

    interpreter._patch_lang = exchange_once


if os.environ.get("TRITON_INTERPRET") == "1":
    quicker_interpreter()
