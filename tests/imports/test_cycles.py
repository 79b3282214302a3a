"""Imports of the package have no circle, those inside functions counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kvpop_vllm.vllm_glue.ledger import LEDGER

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "kvpop_vllm"
ALLOWED: tuple[frozenset[str], ...] = ()
"""Circles that are still there; the list only gets shorter."""


def modules() -> dict[str, Path]:
    """Return the source of each module of the package, by name; Triton kernels too, which lie in a folder of their own."""
    sources = {}
    for folder, prefix in ((ROOT / PACKAGE, PACKAGE), (ROOT / "triton_kernels", f"{PACKAGE}.kernels.triton")):
        for file in folder.rglob("*.py"):
            names = file.relative_to(folder).with_suffix("").parts
            sources[".".join([prefix, *(part for part in names if part != "__init__")])] = file
    return sources


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yield the names that a module imports anywhere but under ``if TYPE_CHECKING``, ``from a import b`` as ``a.b``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.orelse:
                yield from imports(statement, module, is_package)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node, module, is_package)


def arrows(sources: dict[str, Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports, packages of an imported module included but not the importer's own."""
    graph = {}
    for module, file in sources.items():
        graph[module] = set()
        names = imports(ast.parse(file.read_text(encoding="utf-8")), module, file.name == "__init__.py")
        for name in names:
            path = name.split(".")
            loaded = {".".join(path[:end]) for end in range(1, len(path) + 1)} & sources.keys()
            direct = max(loaded, key=len, default=None)
            graph[module] |= {part for part in loaded if part == direct or not f"{module}.".startswith(f"{part}.")}
        graph[module].discard(module)
    return graph


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of modules that all import each other, directly or not."""

    def imported(start: str) -> set[str]:
        reached, queue = set(), [start]
        while queue:
            new = graph[queue.pop()] - reached
            reached |= new
            queue += new
        return reached

    after = {node: imported(node) for node in graph}
    return {frozenset(n for n in after[node] if node in after[n]) for node in graph if node in after[node]}


def test_no_circle_of_imports():
    graph = arrows(modules())
    assert len(graph) > 150 and sum(map(len, graph.values())) > 400
    assert sorted(map(sorted, circles(graph))) == sorted(map(sorted, ALLOWED))


def test_no_wrapper_imports_the_ledger():
    """Wrappers are named by strings, so that what they import does not lead back to the page that names them."""
    graph, ledger = arrows(modules()), {f"{PACKAGE}.vllm_glue.{name}" for name in ("ledger", "install", "plugin")}
    wrappers = {f"{PACKAGE}.vllm_glue.{row.wrapper.split(':')[0]}" for row in LEDGER}
    assert len(wrappers) > 10 and wrappers <= graph.keys()
    assert {name: graph[name] & ledger for name in wrappers if graph[name] & ledger} == {}


def test_what_is_found(tmp_path):
    """A circle through a function, a relative import and a package; not one that only a type checker sees."""
    texts = {
        "p/__init__.py": "",
        "p/a.py": "def f():\n    from p.q import b\n",
        "p/q/__init__.py": "from . import c\n",
        "p/q/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import d\n",
        "p/q/c.py": "try:\n    from ..a import f\nexcept ImportError:\n    pass\n",
        "p/d.py": "import p.q.b\n",
    }
    sources = {}
    for name, text in texts.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        sources[name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = file
    assert circles(arrows(sources)) == {frozenset({"p.a", "p.q", "p.q.c"})}
