"""Documents keep to their lengths, and what they refer to exists."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "DESIGN.md",
    "LOG.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*/README.md")),
]


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ +(.*?) *$", text, flags=re.M)


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_resolve(name):
    path = ROOT / name
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, part = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{name}: {target}"
        assert not part or part in map(anchor, headings(there.read_text())), f"{name}: {target}"


def test_lengths():
    """tests/imports/test_readme.py has the limits of README."""
    assert len((ROOT / "DESIGN.md").read_text().splitlines()) <= 250


def test_code_refers_to_headings_of_the_design():
    found = headings((ROOT / "DESIGN.md").read_text())
    listed = subprocess.run(["git", "ls-files", "*.py", "*.h", "*.cpp"], cwd=ROOT, capture_output=True, text=True)
    paths = [ROOT / line for line in listed.stdout.splitlines() if line != "tests/imports/test_documents.py"]
    assert paths
    for path in paths:
        for named in re.findall(r'DESIGN "([^"]+)"', path.read_text()):
            assert named in found, f"{path}: {named}"


def test_tests_that_documents_name_exist():
    """Every `tests/FILE.py::NAME` of a document is a test, and every feature that works or is refused names one."""
    named = [one for name in DOCUMENTS for one in re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / name).read_text())]
    for file, test in named:
        found = {each.name for each in ast.parse((ROOT / file).read_text()).body if isinstance(each, ast.FunctionDef)}
        assert test in found, f"{file} has no {test}"
    rows = re.findall(r"^\| (.+) \| (.+) \| (.*)\|$", (ROOT / "docs/features.md").read_text(), re.M)
    states = {feature: (state, test) for feature, state, test in rows if feature != "feature"}
    assert len(states) > 20
    for feature, (state, test) in states.items():
        assert state.startswith("Untested") or "::" in test, feature
