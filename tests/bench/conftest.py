from __future__ import annotations

import time

import pytest
from gpu import Bench


@pytest.fixture
def said():
    """Lines of the log."""
    return []


@pytest.fixture
def small(said):
    """Bench of reduced shapes."""
    return Bench("cpu", "torch.float32", True, False, time.monotonic() + 60, said.append)


@pytest.fixture
def on_cpu(said):
    """Bench as on a GPU, except for the device, the dtype and graphs."""
    import torch

    return Bench("cpu", torch.float32, False, False, time.monotonic() + 600, said.append)


@pytest.fixture
def results(tmp_path):
    """CSV file, and the columns that all its rows share."""
    return tmp_path / "gpu.csv", dict.fromkeys(("machine", "commit", "torch", "triton"), "x")
