"""Triton's kernels run by its interpreter on the CPU, in float32 and float16, all in one process.

Triton decides at import whether it interprets, so the classes named here are collected with
TRITON_INTERPRET=1 only. The interpreter runs programs one after another and cannot multiply bfloat16
matrices. Races are therefore not found here, and bfloat16 is only compiled (test_triton_compiled).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = (
    "test_triton_serving.py",
    "test_verify_step.py",
    "test_triton_prefill.py",
    "test_triton_bytes.py",
    "test_triton_variants.py",
    "test_triton_launches.py",
    "test_triton_layers.py",
    "test_running_topk.py",
    "test_sparse_attention.py",
    "test_future_attention_mass.py",
    "test_delayed_mlstm.py",
    "test_online_topk.py",
    "test_write_tokens.py",
    "test_fill_rows.py",
    "test_begin_tail.py",
    "test_draws.py::TestTriton",
    "test_decode_step.py::test_sinks_of_any_size",
    "test_decode_step.py::test_victim_far_out_and_ties",
    "test_decode_step.py::test_strided_inputs_equal_contiguous_ones",
    "test_prefill_chunk.py::test_biases_count_however_a_request_is_cut[mass-newest-17-9-triton]",
    "test_prefill_chunk.py::test_chunks_change_nothing_token_by_token",
    "test_prefill_chunk.py::test_strided_inputs_equal_contiguous_ones",
    "test_prefill_chunk.py::test_requests_are_prefilled_together",
    "test_prefill_chunk.py::test_a_wrong_start_among_others",
    "test_prefill_chunk.py::test_no_tokens",
    "test_prefix.py::test_any_finite_bias_counts",
    "test_prefix.py::test_a_step_out_of_order_is_refused",
    "test_regions.py::test_kernels_do_not_care_where_pages_lie[triton-gate_scores]",
    "../hf/test_triton.py",
)
"""Tests of Triton alone, tests of all implementations that are quick enough, and tests of transformers."""


@pytest.mark.parametrize("marks, fewest", [("not nightly", 60), ("nightly", 60)])
def test_all_pass(marks, fewest):
    """Run the drawn parameter sets, or at night the others."""
    paths = [str(ROOT / "tests/kernels" / test) for test in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *paths]
    environment = os.environ | {"TRITON_INTERPRET": "1", "KVPOP_SLOW_UNTIL": "inf"}
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout[-6000:] + outcome.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", outcome.stdout)[1]) >= fewest
    assert "skipped" not in outcome.stdout


def test_all_classes_are_named():
    """A class that is collected in the interpreter alone would never run if it was not named."""
    named = [test.partition("::") for test in TESTS]
    for file in (ROOT / "tests/kernels").glob("test_*.py"):
        written = set(re.findall(r"^class (Test\w+)", file.read_text(), re.M))
        classes = {name for path, _, name in named if path == file.name}
        assert written <= classes or "" in classes, file.name
