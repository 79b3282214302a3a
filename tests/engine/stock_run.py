"""A stock engine in its own process; test_inert runs this with ``-m`` and reads the report it writes."""

import inspect
import json
import sys
from pathlib import Path

import torch
from engine.tiny_engine import backend, complete, running
from prometheus_client import REGISTRY

import kvpop_vllm

OURS = str(Path(kvpop_vllm.__file__).parent)


def functions_of_ours_in_vllm() -> list[str]:
    """Return ``module:name`` of every function in vLLM's modules and classes whose code is in this package.

    Only modules that are loaded are searched.
    """
    functions = set()
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] != "vllm":
            continue
        classes = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == name]
        owners = [(f"{name}:", module), *((f"{name}:{cls.__qualname__}.", cls) for cls in classes)]
        for prefix, owner in owners:
            for attribute, value in list(vars(owner).items()):
                if isinstance(value, staticmethod | classmethod):
                    value = value.__func__
                if inspect.isfunction(value) and value.__code__.co_filename.startswith(OURS):
                    functions.add(prefix + attribute)
    return sorted(functions)


def main(out: str, model: str, *words: str) -> None:
    """Write greedy outputs of models, the backend's name, imported modules, wrapped functions of vLLM and metrics as JSON."""
    outputs = []
    for folder in words:
        dtype = json.loads((Path(folder) / "config.json").read_text())["dtype"]
        options = {"dtype": dtype, "enable_prefix_caching": False}  # vLLM has none of Mamba2 layers on a CPU
        with running(folder, None, **options) as llm:
            outputs.append(complete(llm, 24))
    with running(model, None, disable_log_stats=False) as llm:
        outputs.append(complete(llm, 24))
        used = backend(llm)
        report = {
            "outputs": outputs,
            "threads": torch.get_num_threads(),
            "backend": f"{used.__module__}.{used.__name__}",
            "modules": sorted(name for name in sys.modules if not name.startswith("kvpop_vllm.testing")),
            "wrapped": functions_of_ours_in_vllm(),
            "metrics": sorted(metric.name for metric in REGISTRY.collect()),
        }
    with open(out, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
