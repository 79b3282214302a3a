"""Contract with vLLM: its version, the functions that are wrapped, and the names that are imported from it.

vLLM's modules are read, not imported. The same checks work on an installation and on a folder of sources.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

from kvpop_vllm import config
from kvpop_vllm.config import ConfigError
from kvpop_vllm.supported import VLLM

if TYPE_CHECKING:
    from kvpop_vllm.vllm_glue.ledger import Patch

GLUE = Path(__file__).parents[1]
MOVED = ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning")
"""Modules of which the first has names up to vLLM 0.32 that the second has since."""


def check_version(version: str) -> None:
    """Check a version of vLLM. See :func:`kvpop_vllm.config.check_version`."""
    config.check_version("vLLM", version, VLLM)


def check_functions(vllm: Path, ledger: Iterable[Patch]) -> None:
    """Check that vLLM has the functions of the ledger.

    Args:
        vllm: folder of the package ``vllm``.
        ledger: the ledger.

    Raises:
        ConfigError: one is missing, or a parameter that its wrapper relies on.
    """
    if functions := missing_functions(vllm, ledger):
        raise missing(functions)


def check_imports(vllm: Path) -> None:
    """Check that vLLM has every name that the glue imports.

    Raises:
        ConfigError: one is missing.
    """
    if names := missing_names(vllm):
        raise missing(names)


def missing(names: Sequence[str]) -> ConfigError:
    """Return the error for functions or names that vLLM does not have."""
    suffix = f" and {len(names) - 1} others" if names[1:] else ""
    return ConfigError(f"this vLLM lacks {names[0]}{suffix}, which kvpop_vllm relies on: install a stock vllm{VLLM}")


def described(patch: Patch) -> str:
    """Return a function of the ledger with the parameters that are relied on."""
    return f"{patch.target}({patch.takes})"


def missing_functions(vllm: Path, ledger: Iterable[Patch]) -> list[str]:
    """Return the functions of the ledger that vLLM lacks, or has without a parameter that is relied on."""
    lacking = (described(patch) for patch in ledger if not fits(patch.takes, parameters(vllm, patch.target)))
    return list(dict.fromkeys(lacking))  # several rows may have one target


def missing_names(vllm: Path) -> list[str]:
    """Return the names that the glue imports from vLLM and vLLM lacks.

    A name that is imported from both places of :data:`MOVED` is needed in one of them.
    """
    names = set(imported_names())

    def places(module: str, name: str) -> list[str]:
        return [place for place in (MOVED if module in MOVED else (module,)) if (place, name) in names]

    lacking = (pair for pair in names if not any(defines(vllm, place, pair[1]) for place in places(*pair)))
    return [f"{module}.{name}" for module, name in sorted(lacking)]


def fits(takes: str, names: Sequence[str] | None) -> bool:
    """Return whether a function has the parameters that its wrapper relies on.

    Args:
        takes: parameters as in the ledger.
        names: names of the function's parameters in their order, None if there is no such function.
    """
    if names is None:
        return False
    leading, named = split(takes)
    return list(names[: len(leading)]) == leading and set(named) <= set(names)


def split(takes: str) -> tuple[list[str], list[str]]:
    """Return the leading and the other parameters of ``takes`` of a ledger entry."""
    leading, _, named = takes.partition("*")
    return tuple([name.strip() for name in part.split(",") if name.strip()] for part in (leading, named))


def parameters(vllm: Path, target: str) -> tuple[str, ...] | None:
    """Return the names of a function's parameters, None if there is no such function.

    Args:
        vllm: folder of the package ``vllm``.
        target: ``module:function`` or ``module:Class.method``.
    """
    module, path = target.split(":")
    code = _code(vllm, module)
    for name in path.split("."):
        code = _inside(code, name)
    if code is None and (origin := _imported_from(vllm, module, path)) is not None:
        return parameters(vllm, f"{origin}:{path}")
    return None if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def imported_names() -> Iterator[tuple[str, str]]:
    """Yield module and name of everything that the glue imports from vLLM, also inside functions."""
    for file in sorted(GLUE.rglob("*.py")):
        for module, names in _imports(file):
            if module.split(".")[0] == "vllm":
                yield from ((module, name) for name in names)


def defines(vllm: Path, module: str, name: str) -> bool:
    """Return whether a module of vLLM has a name: one of its own, of its ``__getattr__``, or of a submodule."""
    if _file(vllm, f"{module}.{name}") is not None:
        return True
    code = _code(vllm, module)
    if code is None:
        return False
    late = _inside(code, "__getattr__")
    return name in code.co_names or (late is not None and name in late.co_consts)


def _imports(file: Path, package: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield the module and the names of every ``from ... import ...``, of relative ones only with the file's package."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (package or node.level == 0):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield origin, [alias.name for alias in node.names]


def _imported_from(vllm: Path, module: str, name: str) -> str | None:
    """Return the module that a module of vLLM imports a name from, None if it does not import it."""
    file = _file(vllm, module)
    if file is None:
        return None
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return next((origin for origin, names in _imports(file, package) if name in names), None)


def _inside(code: CodeType | None, name: str) -> CodeType | None:
    """Return the code of a class or function in that of a module or class, None if there is none."""
    inner = () if code is None else code.co_consts
    return next((constant for constant in inner if isinstance(constant, CodeType) and constant.co_name == name), None)


def _file(vllm: Path, module: str) -> Path | None:
    """Return the source of a module of vLLM, None if there is none."""
    path = vllm.joinpath(*module.split(".")[1:])
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@functools.lru_cache(maxsize=2)
def _code(vllm: Path, module: str) -> CodeType | None:
    """Return the compiled code of a module of vLLM, from Python's cache where it has it, None if there is none."""
    file = _file(vllm, module)
    return None if file is None else SourceFileLoader(module, str(file)).get_code(module)
