"""Start of every Python process of a rehearsal: it counts launches, and changes code that reads values of kernels.

Kernels of the pretended device do nothing, so values mean nothing:

- Modules that compare values lose their assertions, and comparisons with an error bound are left out.
- A step of vLLM says that it has sampled no token; here it has sampled one per request.

Every process of a part writes at its end what it has launched and captured; an engine of :mod:`gpu.engine_times` or :mod:`gpu.host_times` writes
the host time and the counts of its steps, too. ``PRETEND_RECORDS`` names the folder.
"""

import atexit
import ctypes
import importlib.machinery
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

COUNTS = "launches", "graphs", "graph_kernels", "captures", "empty_captures", "copies", "waits"
"""Counts of the pretended driver, in the order of ``pretend_count`` in ``driver.h``."""
STEPS = defaultdict(list)
"""Seconds of CPU time and counts of each step, by engine, budget, kind, requests and tokens."""
CHECKED_BY_VALUE = "gpu.exact", "gpu.full_size"


def counts() -> list[int]:
    """Return the counts of the pretended driver so far."""
    return list((ctypes.c_long * len(COUNTS)).in_dll(ctypes.CDLL("libcuda.so.1"), "pretend_counts"))


class WithoutAssertions(importlib.machinery.SourceFileLoader):
    """Loader of a module whose assertions are left out."""

    def get_code(self, fullname):
        """Return the module's code as ``python -O`` compiles it."""
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)


class Finder:
    """Finder of the modules that are changed."""

    @staticmethod
    def find_spec(name, path, target=None):
        """Return a module's spec with a loader that changes it, or None."""
        if name not in CHANGES and name not in CHECKED_BY_VALUE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and name in CHECKED_BY_VALUE:
            spec.loader = WithoutAssertions(name, spec.origin)
        elif spec:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), CHANGES[name](module))
        return spec


def leave_out_error_bounds(sections) -> None:
    """Make comparisons of outputs with an error bound give a row and no error."""
    sections.within = lambda bench, *outputs, **options: iter([bench.row("not compared", 0.0, "")])


def sample_a_token(async_utils) -> None:
    """Make every request of a step have sampled a token."""
    get_output = async_utils.AsyncOutput.get_output

    def get(self):
        self.num_sampled_tokens_np[:] = 1
        return get_output(self)

    async_utils.AsyncOutput.get_output = get


def engine_name(config) -> str:
    """Return the policy of an engine, or "stock"."""
    policy = config.additional_config.get("kv_policy")
    return policy["policy"] + ", protected" * bool(policy.get("protect_prompt")) if policy else "stock"


def record_steps(llm_engine) -> None:
    """Record CPU time and counts of every engine step."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, step, scheduled = Scheduler.schedule, llm_engine.LLMEngine.step, []

    def record_schedule(self, *arguments, **options):
        output = schedule(self, *arguments, **options)
        budgets = {
            (self.requests[name].sampling_params.extra_args or {}).get("kv_budget", "")
            for name in output.num_scheduled_tokens
        }
        scheduled.append((sorted(budgets, key=str), list(output.num_scheduled_tokens.values())))
        return output

    def record_step(self):
        before, begin = counts(), time.process_time()
        scheduled.clear()
        outputs = step(self)
        seconds = time.process_time() - begin
        if len(scheduled) == 1 and scheduled[0][1]:
            (budgets, tokens), after = scheduled[0], counts()
            kind = "decode" if max(tokens) == 1 else "prefill"
            budget = budgets[0] if len(budgets) == 1 else "mixed"
            differences = (new - old for new, old in zip(after, before, strict=True))
            STEPS[engine_name(self.vllm_config), budget, kind, len(tokens), sum(tokens)].append(
                {"seconds": seconds} | dict(zip(COUNTS, differences, strict=True))
            )
        return outputs

    Scheduler.schedule, llm_engine.LLMEngine.step = record_schedule, record_step


def write_records(module: str, arguments: list[str]) -> None:
    """Write what the process has launched and captured, and its engine's steps."""
    steps = [
        dict(zip(("engine", "budget", "kind", "requests", "tokens"), key, strict=True), counts=rows)
        for key, rows in STEPS.items()
    ]
    record = {"module": module, "name": arguments[0] if arguments else "", "steps": steps}
    record |= dict(zip(COUNTS, counts(), strict=True))
    Path(os.environ["PRETEND_RECORDS"], f"{os.getpid()}.json").write_text(json.dumps(record))


CHANGES = {"gpu.sections": leave_out_error_bounds, "vllm.v1.worker.gpu.async_utils": sample_a_token}
ARGUMENTS = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
if ARGUMENTS and ARGUMENTS[0].startswith("gpu.") and ARGUMENTS[0] != "gpu.run":
    atexit.register(write_records, ARGUMENTS[0], ARGUMENTS[1:])
    if ARGUMENTS[0] in ("gpu.engine_times", "gpu.host_times"):
        CHANGES["vllm.v1.engine.llm_engine"] = record_steps
sys.meta_path.insert(0, Finder)
