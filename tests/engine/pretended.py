"""For tests that run in a process that vLLM takes for one with a GPU (cuda_platform.py), and nowhere else; imports nothing."""

from __future__ import annotations

import os

FLAG = "KVPOP_PRETEND_CUDA"
PRETENDED = os.environ.get(FLAG) == "1"


class Pretended:
    """Its subclasses are collected in such a process only."""

    __test__ = PRETENDED
