"""Docstrings begin with what they are about."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("kvpop_vllm", "triton_kernels", "benchmarks", "tests", "examples")
RIDDLES = re.compile(r"(What|Of|How|Where|Those)\b")


def strings(path: Path) -> list[tuple[int, str]]:
    """Return the strings that document modules, classes, functions and attributes, each with its line."""
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(path.read_text()))]
    found = [each for body in bodies if isinstance(body, list) for each in body if isinstance(each, ast.Expr)]
    constants = [each.value for each in found if isinstance(each.value, ast.Constant)]
    return [(each.lineno, each.value) for each in constants if isinstance(each.value, str)]


@pytest.mark.parametrize("room", ROOMS)
def test_no_docstring_begins_with_a_riddle(room):
    paths = sorted((ROOT / room).rglob("*.py"))
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for path in paths
        for line, text in strings(path)
        if RIDDLES.match(text.strip())
    ]
    assert paths and not wrong, "\n".join(wrong)
