"""Documents keep to their lengths, and what they refer to exists."""

import ast
import importlib.util
import re
from datetime import date
from pathlib import Path

import pytest
from readme import anchor, headings
from words import LOG, ROOT, tracked

DOCUMENTS = tracked("*.md")
WEEKS = sorted(path for path in (ROOT / LOG).glob("*.md") if path.name != "README.md")
"""Files of the log, the oldest first."""
LONGEST_WEEK = 1200
"""Lines of a file of the log from which on a week has another file."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_resolve(name):
    path = ROOT / name
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, part = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{name}: {target}"
        assert not part or part in map(anchor, headings(linked.read_text())), f"{name}: {target}"


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if not name.startswith(LOG)])
def test_imports_exist(name):
    """Names that a document's code imports from the package are there."""
    for module, names in re.findall(r"^from (kvpop_vllm[\w.]*) import ([\w, ]+)$", (ROOT / name).read_text(), re.M):
        imported = importlib.import_module(module)
        lacking = [part for part in names.split(", ") if not hasattr(imported, part)]
        assert all(importlib.util.find_spec(f"{module}.{part}") for part in lacking), f"{module}: {lacking}"


def test_lengths():
    """tests/imports/test_readme.py has the limits of README."""
    assert len((ROOT / "DESIGN.md").read_text().splitlines()) <= 250


def first_day(week: Path) -> date:
    """Return the day on which a file of the log begins, by its name: `2026-W48`, or `2026-W48-4` for the Thursday."""
    year, number, day = re.fullmatch(r"(\d{4})-W(\d\d)(?:-([1-7]))?", week.stem).groups()
    return date.fromisocalendar(int(year), int(number), int(day or 1))


def test_the_log_is_by_weeks():
    """A file has the days from its first one to the next file's or the week's end, the newest on top."""
    starts = [first_day(week) for week in WEEKS]
    assert len(WEEKS) >= 2 and starts == sorted(starts)
    for week, start, following in zip(WEEKS, starts, [*starts[1:], date.max], strict=True):
        days = [date.fromisoformat(day) for day in re.findall(r"^## (\S+): ", week.read_text(), re.M)]
        assert days == sorted(days, reverse=True), week.name
        assert start <= days[-1] and days[0] < following, week.name
        assert {day.isocalendar()[:2] for day in days} == {start.isocalendar()[:2]}, week.name
        assert len(week.read_text().splitlines()) <= LONGEST_WEEK, week.name


def test_the_index_of_the_log_is_complete():
    page = (ROOT / LOG / "README.md").read_text()
    listed = re.findall(r"^- \[(.*)\]\((.*)#(.*)\): (.*)$", page, re.M)
    days = [
        (day, week.name, anchor(f"{day}: {topic}"), topic)
        for week in reversed(WEEKS)
        for day, topic in re.findall(r"^## (\S+): (.*)$", week.read_text(), re.M)
    ]
    assert listed == days


def test_entries_of_the_log_have_short_titles():
    """A title has its verdict in at most 80 characters, and a section of its own address."""
    for week in WEEKS:
        titles = re.findall(r"^### (.*)$", week.read_text(), re.M)
        assert [title for title in titles if len(title) > 80] == [], week.name
        assert len({anchor(title) for title in titles}) == len(titles), week.name


def test_documents_that_code_names_exist():
    """Every document in `docs` that a tracked source file names is there."""
    named = [(file, path) for file in tracked("*.py", "*.h", "*.cpp", "Makefile") for path in paths_of_documents(file)]
    assert named
    assert [(file, path) for file, path in named if not (ROOT / path).exists()] == []


def paths_of_documents(file: str) -> list[str]:
    return re.findall(r"(?<![\w/.])docs/[\w/.-]+\.md\b", (ROOT / file).read_text())


def test_code_refers_to_headings_of_the_design():
    design = headings((ROOT / "DESIGN.md").read_text())
    files = [file for file in tracked("*.py", "*.h", "*.cpp") if file != "tests/imports/test_documents.py"]
    assert files
    for file in files:
        for heading in re.findall(r'DESIGN "([^"]+)"', (ROOT / file).read_text()):
            assert heading in design, f"{file}: {heading}"


def test_tests_that_documents_name_exist():
    """Every `tests/FILE.py::NAME` of a document is a test, and every feature that works or is refused names one."""
    named = [one for name in DOCUMENTS for one in re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / name).read_text())]
    for file, test in named:
        names = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert test in names, f"{file} has no {test}"
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (.*)\|$", (ROOT / "docs/features.md").read_text(), re.M)
    rows = [row for row in rows if row[0] != "feature"]
    assert len(rows) > 20
    for feature, state, on_gpu, test in rows:
        assert state.startswith("Untested") or "::" in test, feature
        assert re.match("(run|rehearsed|interpreted|compiled|refused|untested)(:|$)", on_gpu), feature
