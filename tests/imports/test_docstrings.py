"""Docstrings begin with what they are about."""

import ast
import re
from pathlib import Path

import pytest
from words import docstrings

ROOT = Path(__file__).parents[2]
ROOMS = ("kvpop_vllm", "triton_kernels", "benchmarks", "docs", "tests", "examples")
RIDDLES = re.compile(r"(What|Of|How|Where|Those)\b")


@pytest.mark.parametrize("room", ROOMS)
def test_no_docstring_begins_with_a_riddle(room):
    paths = sorted((ROOT / room).rglob("*.py"))
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for path in paths
        for line, text in docstrings(ast.parse(path.read_text()))
        if RIDDLES.match(text.strip())
    ]
    assert paths and not wrong, "\n".join(wrong)
