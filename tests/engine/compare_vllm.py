"""Compare a folder of vLLM's sources with what the glue relies on: ``python -m tests.engine.compare_vllm FOLDER``.

FOLDER is the ``vllm`` of another version.
"""

import inspect
import sys
from pathlib import Path

from kvpop_vllm.vllm_glue.ledger import FUNCTIONS
from kvpop_vllm.vllm_glue.start import contract


def missing_overrides(vllm: Path) -> list[str]:
    """Return the methods that classes of the glue override, and that vLLM lacks or calls with other parameters.

    The installed vLLM is imported for this, because it says which classes are the bases.
    """
    from kvpop_vllm.vllm_glue.extras import metrics
    from kvpop_vllm.vllm_glue.run import backend, cache_spec, cuda_backend, gated_attention, models

    modules = backend, cache_spec, cuda_backend, gated_attention, metrics, models
    classes = {cls for module in modules for cls in vars(module).values() if inspect.isclass(cls)}
    missing = set()
    for cls in classes:
        for name, ours in vars(cls).items():
            ours = getattr(ours, "__func__", ours)
            if not inspect.isfunction(ours) or contract.GLUE not in Path(ours.__code__.co_filename).parents:
                continue
            takes = inspect.signature(ours).parameters
            anything = any(
                parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in takes.values()
            )
            for base in cls.__mro__:
                if base.__module__.split(".")[0] == "vllm" and inspect.isroutine(vars(base).get(name)):
                    target = f"{base.__module__}:{base.__qualname__}.{name}"
                    names = contract.parameters(vllm, target)
                    if names is None or not (anything or set(names) <= set(takes)):
                        missing.add(target if names is None else f"{target}({', '.join(takes)})")
                    break  # the nearest says how it is called
    return sorted(missing)


def main(folder: str) -> int:
    """Print what the ``vllm`` in a folder lacks; return 1 if it lacks anything."""
    vllm = Path(folder)
    if not (vllm / "__init__.py").is_file():
        raise SystemExit(f"{folder} has no __init__.py: give the folder vllm of unpacked sources")
    lacking = contract.missing_functions(vllm, FUNCTIONS) + contract.missing_names(vllm) + missing_overrides(vllm)
    for target in lacking:
        print(f"lacks {target}")
    names = len(set(contract.imported_names()))
    print(f"{len(FUNCTIONS)} wrapped functions, {names} imported names: {len(lacking)} lacking")
    return bool(lacking)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
