"""`make gpu-rehearse`: the exact command of the GPU machine, `make gpu`, on a machine without a GPU.

On the machine of :mod:`gpu.machine` memory of the device is memory of the process, copies are real, and kernels do
nothing. So this shows whether every part starts, imports, compiles each kernel that it launches for sm_90, gives
kernels nothing but the device's memory, captures graphs and ends in time. Values, races and times of the GPU it cannot
show.

It prints the host's time of an engine step, and how many launches, copies and waits a step has. The part "host-times" runs
here alone: engines with policies and stock vLLM take turns, and prefill steps may not launch more than some kernels.
"""

import csv
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.machine import ROOT, Machine, parser_of
from gpu.run import HOST_TIMES, PARTS

SLACK = 6
"""Time limits are multiplied by this: the machine may have two busy cores."""
CAPTURING = "gpu.sections", "gpu.attention_times", "gpu.engine_times", "gpu.host_times", "gpu.answers"
"""Modules whose processes capture graphs."""
FEWEST = 5
"""Steps of a kind that a row of the table needs."""
MOST_LAUNCHES = {"streaming-llm": 50, "kvpop": 245, "streaming-llm, protected": 0, "kvpop, protected": 0}
"""Launches of a prefill step of 28 layers beyond stock's, at most."""
COLUMNS = ("engine", "budget", "step", "requests", "tokens", "steps", "host_ms", "low", "high", "of_stock")
COUNTED = ("launches", "graphs", "graph_kernels", "copies", "waits")


def main() -> int:
    """Make the machine, run the command on it, and judge what it did; return 0 if nothing is wrong."""
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", help="only these parts")
    parser.add_argument("--slack", type=float, default=SLACK, help="multiplies the time limits of the parts")
    options = parser.parse_args()
    machine = Machine(options.vllm)
    machine.make(options.python312)
    machine.make_libraries()
    out, records = machine.rehearsal / "results", machine.rehearsal / "records"
    for folder in (out, records):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    (machine.rehearsal / "home").mkdir(exist_ok=True)
    environment = machine.environment(out, records)
    contract = [machine.python, "-m", "tests.engine.compare_vllm", machine.vllm]
    paths = f"{environment['PYTHONPATH']}:{machine.vllm.parent}"
    lacks = subprocess.run(contract, cwd=ROOT, env=environment | {"PYTHONPATH": paths}).returncode
    chosen = options.parts or [part.name for part in PARTS if not part.by_name_only or part.name == HOST_TIMES]
    variables = [f"PYTHON={machine.python}", f"PARTS={' '.join(chosen)} --slack {options.slack}"]
    code = subprocess.run(["make", "--no-print-directory", "gpu", *variables], cwd=ROOT, env=environment).returncode
    processes = [json.loads(path.read_text()) for path in sorted(records.glob("*.json"))]
    write_steps(processes, out / "steps.csv")
    faults = ["vLLM lacks what is printed above"] if lacks else []
    faults += [f"`make gpu` ended with exit code {code}: see {out / 'run.log'}"] if code else []
    faults += graph_faults(processes) + launch_faults(processes)
    for fault in faults:
        print(f"[gpu-rehearse] FAULT: {fault}")
    print(f"[gpu-rehearse] {'failed' if faults else 'passed'}; results in {out.relative_to(ROOT)}")
    return int(bool(faults))


def graph_faults(processes: list[dict]) -> list[str]:
    """Return what is wrong with the graphs of the processes."""
    faults = []
    for process in processes:
        name = f"{process['module']} {process['name']}"[:80]
        if process["module"] in CAPTURING and not process["captures"]:
            faults.append(f"{name}: no graph was captured")
        if process["empty_captures"]:
            faults.append(f"{name}: {process['empty_captures']} graphs were captured without a kernel")
        for step in process["steps"]:
            ungraphed = sum(not counts["graph_kernels"] for counts in step["counts"])
            if step["kind"] == "decode" and ungraphed:
                faults.append(f"{name}: {ungraphed} decode steps of {step['requests']} requests replayed no graph")
    return faults


def launch_faults(processes: list[dict]) -> list[str]:
    """Return which engines launch more in a prefill step than they may, next to stock vLLM in the same process."""
    faults = []
    for process in processes:
        medians = {key: statistics.median(x["launches"] for x in steps) for key, steps in steps_of(process).items()}
        for (engine, _, kind, *prompts), launches in medians.items():
            more = launches - medians.get(("stock", "", kind, *prompts), launches)
            if kind == "prefill" and more > MOST_LAUNCHES.get(engine, more):
                faults.append(
                    f"{engine}: a step of {prompts[0]} prompts, {prompts[1]} tokens, launches {more:g} more than stock"
                )
    return faults


def steps_of(process: dict) -> dict[tuple, list[dict]]:
    """Return the counts of each step of a process, of which there are enough, by engine, budget, kind, requests and tokens."""
    names = "engine", "budget", "kind", "requests", "tokens"
    steps = {tuple(step[name] for name in names): step["counts"] for step in process["steps"]}
    return {key: counts for key, counts in steps.items() if len(counts) >= FEWEST}


def write_steps(processes: list[dict], path: Path) -> None:
    """Write and print host time and counts of engine steps: medians, the range of times, and the median in stock's."""
    rows = []
    for process in processes:
        steps = steps_of(process)
        times = {key: [1e3 * step["seconds"] for step in counts] for key, counts in steps.items()}
        for key, counts in steps.items():
            engine, budget, *kind = key
            mine, stock = times[key], times.get(("stock", "", *kind))
            values = [f"{statistic(mine):.2f}" for statistic in (statistics.median, min, max)]
            values.append(f"{statistics.median(mine) / statistics.median(stock):.2f}" if stock else "")
            medians = [f"{statistics.median(step[name] for step in counts):g}" for name in COUNTED]
            rows.append((engine, budget, *kind, len(counts), *values, *medians))
    rows.sort(key=lambda row: (row[2], row[3], row[4], row[0], str(row[1])))
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS + COUNTED, *rows])
    widths = [max(len(str(value)) for value in column) for column in zip(COLUMNS + COUNTED, *rows, strict=True)]
    for row in [COLUMNS + COUNTED, *rows] if rows else []:
        print("  ".join(f"{value!s:>{width}}" for value, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
