"""Bare function words as names, and three words of prose: what is counted, and how often they occur today.

`python tests/words.py` prints :data:`COUNTS` as it should be now, `python tests/words.py WORD` where a word occurs.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUNCTION_WORDS = frozenset(
    "asked at behind beside both each found given held here kept known least made meant most of others own said seen some "
    "such taken them there these those told wanted what where which whole".split()
)
"""Words that say nothing of what a variable, a parameter or a field holds."""
PROSE_WORDS = "behind", "beside", "anew"
"""Words of which plain English has better ones: after, next to, again."""
LOG = "LOG.md", "docs/log/"
"""Documents whose words are not counted."""
COUNTS: dict[str, int] = {
    "name asked": 80,
    "name at": 92,
    "name behind": 11,
    "name beside": 5,
    "name both": 10,
    "name each": 113,
    "name found": 340,
    "name given": 51,
    "name held": 121,
    "name here": 12,
    "name kept": 86,
    "name known": 34,
    "name least": 23,
    "name made": 58,
    "name most": 60,
    "name of": 14,
    "name others": 23,
    "name own": 303,
    "name said": 40,
    "name seen": 131,
    "name some": 8,
    "name taken": 8,
    "name them": 2,
    "name there": 32,
    "name those": 3,
    "name told": 61,
    "name wanted": 18,
    "name what": 21,
    "name where": 38,
    "name which": 6,
    "name whole": 49,
    "prose anew": 15,
    "prose behind": 196,
    "prose beside": 79,
}
"""Uses of each word today: names of tracked Python files, words of docstrings, comments and documents.

They may only be lowered. :mod:`tests.imports.test_words` fails where one has risen, and where one has fallen and is not
lowered here.
"""


def tracked(*patterns: str) -> list[str]:
    """Return the tracked files that match patterns of git, relative to the repository."""
    run = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in run.stdout.splitlines() if (ROOT / line).exists()]


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the bare function words that a module binds as variables, parameters or fields, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            name = node.name or ""
        else:
            continue
        if name.strip("_") in FUNCTION_WORDS:
            yield name.strip("_"), node.lineno


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the strings that document modules, classes, functions and attributes, each with its line."""
    for node in ast.walk(tree):
        for statement in body if isinstance(body := getattr(node, "body", None), list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value


def comments(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a source file, each with its line."""
    if file.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    else:
        pattern = r"//[^\n]*|/\*.*?\*/" if file.endswith((".cpp", ".h")) else r"(?:^|\s)#[^\n]*"
        for match in re.finditer(pattern, text, re.S | re.M):
            yield text.count("\n", 0, match.start()) + 1, match[0]


def prose_uses(text: str, line: int = 1) -> Iterator[tuple[str, int]]:
    """Yield the words of :data:`PROSE_WORDS` in a text that begins at a line, each with its line."""
    for match in re.finditer(rf"\b(?:{'|'.join(PROSE_WORDS)})\b", text, re.I):
        yield match[0].lower(), line + text.count("\n", 0, match.start())


def uses() -> Iterator[tuple[str, str, int]]:
    """Yield each use: a key of :data:`COUNTS`, the file and the line."""
    for file in tracked("*.py"):
        text = (ROOT / file).read_text(encoding="utf-8")
        tree = ast.parse(text)
        yield from ((f"name {name}", file, line) for name, line in bound_names(tree))
        for start, passage in (*docstrings(tree), *comments(file, text)):
            yield from ((f"prose {word}", file, line) for word, line in prose_uses(passage, start))
    for file in tracked("*.cpp", "*.h", "*.sh", "*.yml", "Makefile", "*.toml"):
        for start, passage in comments(file, (ROOT / file).read_text(encoding="utf-8")):
            yield from ((f"prose {word}", file, line) for word, line in prose_uses(passage, start))
    for file in tracked("*.md"):
        if not file.startswith(LOG):
            text = (ROOT / file).read_text(encoding="utf-8")
            text = re.sub(r"\]\([^)\s]*\)", "]", text)  # targets of links
            yield from ((f"prose {word}", file, line) for word, line in prose_uses(text))


if __name__ == "__main__":
    if words := sys.argv[1:]:
        for key, path, line in uses():
            if key.split()[1] in words:
                print(f"{path}:{line}: {key}")
    else:
        for key, number in sorted(Counter(key for key, *_ in uses()).items()):
            print(f'    "{key}": {number},')
