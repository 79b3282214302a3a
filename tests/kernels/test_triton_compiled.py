"""Triton kernels compiled for GPUs that need not be present: resources, and torch ops of a decode step."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that a block may have, in bytes, by compute capability."""
TRAINED = "_backward_queries", "_backward_keys", "_mass"
"""Kernels of training alone whose blocks grow with the size of a head."""


@pytest.fixture(scope="module")
def compiled():
    """Output of ``triton_resources.py`` for kernels of a few rules.

    They are compiled through their own launches, with the options and specialisations of a launch on a GPU,
    in a process without the interpreter. Triton caches compiled kernels by source, options and its own
    version, so unchanged kernels are compiled once.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(ROOT / "build/triton")
    command = [sys.executable, str(ROOT / "tests/kernels/triton_resources.py"), "--json", "few"]
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return json.loads(outcome.stdout.splitlines()[-1])


def test_every_kernel_compiles(compiled):
    launched = [
        re.findall(r"\b(_[a-z_]+)\[.*\]\(|(?:launch|_of_rows)\(\s*(_[a-z_]+),", file.read_text())
        for file in (ROOT / "triton_kernels").glob("*.py")
    ]
    written = {kernel for names in launched for pair in names for kernel in pair if kernel}
    assert len(written) == 15 + 8 + 7 + 10
    rows = [row for row in compiled["rows"] if row["op"] not in ("biased", "large")]
    kernels = {(row["arch"], row["dtype"], row["size"]): set() for row in rows}
    for row in rows:
        kernels[row["arch"], row["dtype"], row["size"]].add(row["kernel"])
    assert kernels.keys() == {(90, "bfloat16", 128), (80, "float32", 128), (90, "float16", 64)}
    assert kernels[90, "bfloat16", 128] == kernels[80, "float32", 128] == written
    assert kernels[90, "float16", 64] == {"_project", "_cells", "_evict_and_insert", "_attend"}, "of an mLSTM"


def test_attention_with_biases_and_sinks_compiles(compiled):
    """It compiles for three generations of GPUs, and decoding with attention masses and without."""
    rows = [row for row in compiled["rows"] if row["op"] == "biased"]
    variants = {(row["arch"], row["dtype"], row["kernel"], row["scorer"]) for row in rows}
    kinds = ("_attend", "stored"), ("_attend", "mlstm"), ("_attend_keys", "any"), ("_steps", "stored")
    targets = (80, "float32"), (90, "bfloat16"), (90, "float16"), (100, "bfloat16")
    assert variants == {(*target, *kind) for target in targets for kind in kinds}
    decode = [row for row in rows if row["kernel"] == "_attend"]
    assert [row for row in decode if row["stack"] > 64 or 2 * row["shared"] > SHARED[row["arch"]]] == []


def test_heads_of_512_fit_a_multiprocessor(compiled):
    """Attention spills nothing, and two programs of decoding fit on an A100; products of moments and steps one by one spill.

    Training spills as little as with smaller heads.
    """
    rows = [row for row in compiled["rows"] if row["op"] == "large"]
    kernels = {(row["kernel"], row["scorer"]) for row in rows}
    assert kernels == {
        *(("_attend", "stored"), ("_attend", "mlstm"), ("_attend_keys", "any")),
        *(("_products", "any"), ("_residuals", "any"), ("_steps", "residual")),
        *((kernel, "any") for kernel in TRAINED),
    }
    assert {row["arch"] for row in rows} == {*SHARED} and len(rows) == len(SHARED) * len(kernels)
    attention = [row for row in rows if row["kernel"] in ("_attend", "_attend_keys")]
    assert [row for row in attention if row["stack"]] == []
    assert [row for row in rows if row["kernel"] in TRAINED and row["stack"] > 512] == []
    programs = {"_attend": 2}
    assert [row for row in rows if programs.get(row["kernel"], 1) * row["shared"] > SHARED[row["arch"]]] == []


@pytest.mark.parametrize(
    "op, stack, programs",
    [
        ("training", 512, 1),
        ("decode_step", 64, 2),
        ("prefix", 64, 2),
        ("biased", 256, 1),
        ("verify_step", 64, 1),
        ("prefill_chunk", 64, 1),
    ],
)
def test_kernels_fit_a_multiprocessor(compiled, op, stack, programs):
    """Shared memory holds ``programs`` of each kernel, and little is spilled with 255 registers.

    A program of all phases of a step may spill more: its multiprocessor has no other. So may one that plans all drafts.
    """
    rows = [row for row in compiled["rows"] if row["op"] == op]
    assert rows
    limits = {"_steps": max(stack, 256), "_plan": max(stack, 320)}
    wrong = [
        row
        for row in rows
        if row["stack"] > limits.get(row["kernel"], stack) or programs * row["shared"] > SHARED[row["arch"]]
    ]
    assert wrong == []


def test_loads_of_attention_overlap_its_products(compiled):
    """No wait in the loops of attention is for all loads: those of the next block are still under way."""
    rows = [row for row in compiled["rows"] if row["kernel"] in ("_attend", "_attend_keys")]
    variants = {(row["kernel"], row["op"], row["arch"]) for row in rows}
    assert variants == {
        *(("_attend", op, arch) for op in ("decode_step", "prefix") for arch in (80, 90)),
        *(("_attend_keys", op, arch) for op in ("prefill_chunk", "training") for arch in (80, 90)),
        *(
            (kernel, op, arch)
            for kernel in ("_attend", "_attend_keys")
            for op in ("biased", "large")
            for arch in SHARED
        ),
    }
    assert [row for row in rows if not row["waits"] or min(row["waits"]) == 0] == []


def test_launches_of_a_step_begin_while_the_one_before_runs(compiled):
    """Each waits for it ahead of its own loads and stores, and on a GPU without such launches is one like any other."""
    ops = "decode_step", "prefix", "verify_step"
    rows = [row for row in compiled["rows"] if row["op"] in ops or row["kernel"] == "_attend"]
    assert {row["arch"] for row in rows} == {80, 90, 100} and len({row["kernel"] for row in rows}) == 8 + 7
    assert [row for row in rows if not row["dependent"] == row["awaits"] == (row["arch"] >= 90)] == []


def test_products_of_training_are_single_ones_of_tf32(compiled):
    """They are at most a third of those that an mLSTM with exact products takes."""
    for kernel, arch in (("_states", 80), ("_states", 90), ("_readout", 80), ("_readout", 90)):
        rows = [
            row for row in compiled["rows"] if (row["kernel"], row["op"], row["arch"]) == (kernel, "training", arch)
        ]
        assert len(rows) == 2
        once, exact = sorted(row["products"] for row in rows)
        assert 0 < 3 * once <= exact, (kernel, arch, once, exact)


def test_steps_read_nothing_ahead_of_their_token(compiled):
    """Ahead of the loop over tokens a program loads four numbers of its chunk, and nothing of pages or workspaces."""
    rows = [row for row in compiled["rows"] if row["kernel"] == "_steps"]
    assert {row["scorer"] for row in rows} == {"stored", "residual", "mlstm"}
    assert {row["ahead"] for row in rows} == {4}


def test_scores_round_as_in_the_reference(compiled):
    """Kernels that compare scores in float64 have no fused multiply-adds; the interpreter never has any."""
    ranking = "_cells", "_evict_and_insert", "_sort_entries", "_simulate", "_steps", "_advance", "_draft_cells", "_plan"
    assert {(row["kernel"], row["fused"]) for row in compiled["rows"] if row["kernel"] in ranking} == {
        (kernel, False) for kernel in ranking
    }


def test_nothing_is_read_back_and_launches_follow_from_shapes(compiled):
    """No tensor value is read, torch only allocates, and padding is launched like any other step."""
    limits = {"mlstm": (4, 7), "mlstm-corrected": (6, 9), "moment": (5, 8)}
    assert {(step["op"], step["case"]) for step in compiled["steps"]} == {
        *(("decode_step", case) for case in limits),
        *(("prefix", case) for case in limits if case != "mlstm"),
        *(("biased", case) for case in limits if case != "mlstm-corrected"),
    }
    for step in compiled["steps"]:
        padding, tokens = step["found"]
        assert padding == tokens and padding["launches"]
        assert {op for op, _ in padding["ops"]} == {"aten.empty.memory_format", "aten.empty_like.default"}
        launches, ops = limits[step["case"]]
        assert len(padding["launches"]) == launches and len(padding["ops"]) <= ops, (step["case"], padding)


def test_a_verifying_step_reads_nothing_back_and_takes_few_launches(compiled):
    """Launches do not depend on what is accepted; torch fills outputs, and allocates."""
    launches = {"mlstm": 7, "mlp": 6}
    assert {step["case"] for step in compiled["verified"]} == launches.keys()
    for step in compiled["verified"]:
        padding, tokens = step["found"]
        assert padding == tokens and len(padding["launches"]) == launches[step["case"]]
        assert not [name for name, _ in padding["ops"] if not re.match(r"aten\.(empty|new_empty|zeros|fill)", name)]


def test_a_prefill_does_not_wait_for_the_device(compiled):
    """Nothing is read but budgets and p, which are on the CPU, for chunks in pieces or token by token."""
    assert {chunk["case"] for chunk in compiled["chunks"]} == {
        *("mlstm", "gate_scores-ages", "mlp", "mass-mean", "moment-corrected", "mlstm-corrected")
    }
    assert [chunk for chunk in compiled["chunks"] if chunk["reads"]] == []


def test_launches_and_ops_of_a_prefill_do_not_depend_on_the_number_of_requests(compiled):
    """As many tokens of five requests take what those of one take. The limits are those of all layers but the first two."""
    chunks, limits = {}, {"mlstm": (11, 4), "mlp": (8, 30), "gate_scores-ages": (7, 12)}
    limits |= dict.fromkeys(("mass-mean", "moment-corrected", "mlstm-corrected"), (1, 4))  # for three tokens of each
    for chunk in compiled["chunks"]:
        about = chunk["case"], chunk["protected"], chunk["biased"]
        chunks.setdefault(about, {}).setdefault(chunk["requests"], chunk["layers"])
    assert len(chunks) == 10
    for (case, *_), layers in chunks.items():
        for one, five in zip(layers[1], layers[5], strict=True):
            assert five["launches"] == one["launches"], case
            assert abs(len(five["ops"]) - len(one["ops"])) <= 2, case
        for layer in (layers[1][2], layers[5][2]):
            assert len(layer["launches"]) <= limits[case][0] and len(layer["ops"]) <= limits[case][1], case


def test_a_tail_begins_without_waiting(compiled):
    """Only p is read, which is on the CPU, and five tails begin in as many launches and ops as two."""
    assert compiled["begun"]
    for two, five in compiled["begun"]:
        assert two == five and len(two["launches"]) == 1 and not two["reads"]
