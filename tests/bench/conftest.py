from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.fixture
def on_cpu(script):
    """Bench as on a GPU, except for the device, the dtype and graphs."""
    import torch

    return script.Bench("cpu", torch.float32, False, False, time.monotonic() + 600, lambda line: None)
