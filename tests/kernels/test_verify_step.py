"""Verification of drafts: outputs and pages are those of ordinary steps."""

from __future__ import annotations

from kernels.problems import problem
from kernels.served import Pool


def test_a_token_without_drafts_takes_an_ordinary_step():
    p = problem("mlstm", drafts=3)
    ordinary, verified = Pool(p), Pool(p)
    for _ in range(30):
        out, lse = ordinary.decode([0], "reference")
        found = verified.verify({0: 0}, "reference")
        assert out.equal(found[0]) and lse.equal(found[1])
