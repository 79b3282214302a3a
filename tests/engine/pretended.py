"""Base class of tests that run only in a process that vLLM takes for one with a GPU (cuda_platform.py).

This module imports nothing of vLLM.
"""

from __future__ import annotations

import os

FLAG = "KVPOP_PRETEND_CUDA"
PRETENDED = os.environ.get(FLAG) == "1"


class Pretended:
    """Base of test classes that are collected in such a process only."""

    __test__ = PRETENDED
