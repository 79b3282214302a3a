"""A stock engine in a process of its own; test_inert runs this with ``-m`` and reads the report it writes."""

from __future__ import annotations

import json
import sys

from engine.tiny_engine import backend, complete, start, stop


def main(model: str, out: str) -> None:
    """Writes greedy outputs, the backend's name, the imported modules and what is wrapped of vLLM as JSON."""
    llm = start(model, None)
    outputs = complete(llm, 24)

    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    names = [(EngineArgs, name) for name in ("add_cli_args", "create_engine_config", "from_cli_args")]
    names.append((InputProcessor, "process_inputs"))
    used = backend(llm)
    report = {
        "outputs": outputs,
        "backend": f"{used.__module__}.{used.__name__}",
        "modules": sorted(name for name in sys.modules if not name.startswith("kvpop_vllm.testing")),
        "wrapped": [name for owner, name in names if hasattr(getattr(owner, name), "_kvpop_wrapped")],
    }
    stop(llm)
    with open(out, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
