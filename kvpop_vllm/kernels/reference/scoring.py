"""Readout of the mLSTM's state, shared by the reference kernels."""

from __future__ import annotations

import torch

READOUT_EPS = 1e-6


def readout_denominator(qz: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Return the denominator ``q.z + eps`` of a readout, with eps = 1e-6 before stabilisation.

    Args:
        qz: ``q.z`` of the stored state, which is the true state times ``exp(-m)``.
        m: stabiliser.
    """
    return qz + READOUT_EPS * torch.exp(-m.clamp(-60.0, 60.0))
