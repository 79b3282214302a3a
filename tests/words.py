"""Bare function words as names, three words of prose, and patterns of documents: what is counted, and how often.

`python tests/words.py` prints :data:`COUNTS` as it should be now, `python tests/words.py WORD` where a word occurs.
"""

import ast
import functools
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
    "any asked at behind beside both each found given held here kept known least made meant more most of other others own "
    "parts rest said seen some such taken them there these those told wanted what where which whole".split()
)
"""Words that say nothing of what a variable, a parameter or a field holds."""
PROSE_WORDS = "behind", "beside", "anew"
"""Words of which plain English has better ones: after, next to, again."""
PATTERNS: dict[str, tuple[str, str, str]] = {
    "is no": (
        r"(?<!there )\b(?:is|are|was|were|be) no (?!longer|more|less|fewer|other|slower|faster|better|worse|larger)[a-z]+",
        "Cartridge slots are no tokens.",
        "Cartridge slots are not tokens, and there are no others.",
    ),
    "of equal": (r"\bof equal [a-z]+,? the\b", "Of equal scores the older is evicted.", "Ties evict the older token."),
    "what is what": (
        r"\bwhat [^.;:|]{1,60} (?:is|are) what\b",
        "What the engine keeps is what the oracle keeps.",
        "The engine keeps the tokens that the oracle keeps.",
    ),
    "what else": (
        r"\bwhat else\b",
        "What else there is the wrapper passes on.",
        "All other parameters are passed through.",
    ),
    "tell apart": (
        r"\b(?:tells?|told) (?:[a-z]+ ){0,4}apart\b",
        "Choices of four tell no caches apart.",
        "Four-way multiple choice is too coarse to rank the methods.",
    ),
    "this is where": (
        r"\bthis is where\b",
        "This is where it is decided.",
        "Single source of truth for supported versions.",
    ),
    "is asked for": (
        r"\b(?:is|are|was|were) asked for\b",
        "It is built each time it is asked for.",
        "It is rebuilt for each layer.",
    ),
    "is told": (r"\b(?:is|are|was|were|be) told\b", "Workers are told the budget.", "Workers receive the budget."),
    "is said": (r"\b(?:is|are|was|were) said\b", "What is assumed is said.", "Assumptions are printed."),
    "own needs": (
        r"'s own needs\b",
        "More than the server's own needs `--kv-max-budget`.",
        "To let requests exceed the server's budget, start it with `--kv-max-budget`.",
    ),
    "reads as": (r"\breads [a-z] as [a-z]\b", "It reads s as p.", "With a prefix, p takes the place of s."),
    "reckon": (r"\breckon", "By reckoning it takes 2 s.", "By an estimate it takes 2 s."),
    "the one before": (
        r"\bthe ones? before\b",
        "The scorer is better than the one before.",
        "It beats the former one.",
    ),
    "semicolon": (r";(?=\s)", "The cache is small; it has pages.", "The cache is small. It has pages."),
}
"""Patterns that documents avoid: a regular expression for text without code, a sentence that has it, and a better one.

Case does not matter, and a blank stands for a line break too.
"""
LOG = "docs/log/"
"""Folder of documents whose words are not counted."""
COUNTS: dict[str, int] = {
    "name more": 5,
    "name other": 24,
    "name parts": 37,
    "name rest": 6,
}
"""Uses of each word and pattern today: names in Python files, words of docstrings, comments and documents, patterns of
documents.

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


def pattern_uses(text: str) -> Iterator[tuple[str, int]]:
    """Yield the :data:`PATTERNS` of a document, each with its line. Code and targets of links do not count."""
    text = re.sub(r"^```.*?^```|`[^`]*`", lambda code: re.sub(r"[^\n]", "x", code[0]), text, flags=re.M | re.S)
    text = re.sub(r"(?<=\]\()[^)\s]*", lambda target: "x" * len(target[0]), text)
    joined = re.sub(r"(?<=\S)\n(?=[\w(\"*])", " ", text)
    for name, (pattern, _, _) in PATTERNS.items():
        for match in re.finditer(pattern, joined, re.I):
            yield name, 1 + text.count("\n", 0, match.start())


@functools.cache
def uses() -> list[tuple[str, str, int]]:
    """Return each use: a key of :data:`COUNTS`, the file and the line."""
    return list(_uses())


def _uses() -> Iterator[tuple[str, str, int]]:
    """Yield what :func:`uses` returns."""
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
            yield from ((f"pattern {name}", file, line) for name, line in pattern_uses(text))
            text = re.sub(r"\]\([^)\s]*\)", "]", text)  # targets of links
            yield from ((f"prose {word}", file, line) for word, line in prose_uses(text))


if __name__ == "__main__":
    if words := sys.argv[1:]:
        for key, path, line in uses():
            if key.partition(" ")[2] in words:
                print(f"{path}:{line}: {key}")
    else:
        for key, number in sorted(Counter(key for key, *_ in uses()).items()):
            print(f'    "{key}": {number},')
