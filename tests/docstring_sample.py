"""Twenty docstrings of the package and its tests, drawn by a seed, at an earlier commit and now.

`python tests/docstring_sample.py COMMIT` prints them. Drawn are functions, methods and classes that have a docstring and a
name of their own at both.
"""

import ast
import inspect
import random
import subprocess
import sys
from collections import defaultdict

from words import ROOT

SEED, COUNT = 55, 20


def run_git(*words: str) -> str:
    """Return the output of a git command in the repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def documented(commit: str) -> dict[str, tuple[str, str]]:
    """Return file and docstring of each definition of a commit whose qualified name occurs once."""
    places = defaultdict(list)
    for file in run_git("ls-tree", "-r", "--name-only", commit).splitlines():
        if file.endswith(".py"):
            collect(ast.parse(run_git("show", f"{commit}:{file}")), file, "", places)
    return {name: entries[0] for name, entries in places.items() if len(entries) == 1}


def collect(node: ast.AST, file: str, prefix: str, places: dict[str, list[tuple[str, str]]]) -> None:
    """Add the documented definitions in a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(child):
                places[prefix + child.name].append((file, inspect.cleandoc(text)))
            collect(child, file, f"{prefix}{child.name}.", places)


if __name__ == "__main__":
    earlier, now = documented(sys.argv[1]), documented("HEAD")
    for name in random.Random(SEED).sample(sorted(earlier.keys() & now.keys()), COUNT):
        for when, (file, text) in ((sys.argv[1], earlier[name]), ("now", now[name])):
            print(f"{name}, {file}, {when}:\n\n{text}\n")
