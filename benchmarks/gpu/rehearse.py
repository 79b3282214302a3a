"""`make gpu-rehearse`: the exact command of the GPU machine, `make gpu`, on a machine without a GPU.

An environment with the GPU machine's packages, and without NVIDIA's libraries, is made in ``build/gpu/machine``. In place of
the libraries stand those of ``pretend/``: memory of the device is memory of the process, copies are real, and kernels
do nothing. So this shows whether every part starts, imports, compiles each kernel that it launches for sm_90, gives kernels
nothing but the device's memory, captures graphs and ends in time. Values, races and times of the GPU it cannot show.

It prints the host's time of an engine step, and how many launches, copies and waits a step has.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.pretend.build import build

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
MACHINE, PRETEND, HEADERS, REHEARSAL = (BUILD / name for name in ("machine", "pretend", "headers", "rehearsal"))
PACKAGES = Path(__file__).with_name("machine.txt")
CUDA_HEADERS = "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"
SLACK = 6
"""Time limits are multiplied by this: the machine may have two busy cores."""
CAPTURING = "gpu.sections", "gpu.attention_times", "gpu.engine_times", "gpu.answers"
"""Modules whose processes capture graphs."""
FEWEST = 5
"""Steps of a kind that a row of the table needs."""
COLUMNS = ("engine", "budget", "step", "requests", "tokens", "steps", "host_ms", "low", "high")
COUNTED = ("launches", "graphs", "graph_kernels", "copies", "waits")


def main() -> int:
    """Make the machine, run the command on it, and judge what it did; return 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only these parts of `make gpu`")
    parser.add_argument("--python312", default="python3.12", help="interpreter of the machine: Python 3.12")
    parser.add_argument("--slack", type=float, default=SLACK, help="multiplies the time limits of the parts")
    options = parser.parse_args()
    make_machine(options.python312)
    make_libraries()
    out, records = REHEARSAL / "results", REHEARSAL / "records"
    for folder in (out, records):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    variables = [f"PYTHON={MACHINE / 'bin' / 'python'}", f"PARTS={' '.join(options.parts)} --slack {options.slack}"]
    code = subprocess.run(
        ["make", "--no-print-directory", "gpu", *variables], cwd=ROOT, env=environment(out, records)
    ).returncode
    processes = [json.loads(path.read_text()) for path in sorted(records.glob("*.json"))]
    write_steps(processes, out / "steps.csv")
    faults = [f"`make gpu` ended with exit code {code}: see {out / 'run.log'}"] if code else []
    faults += graph_faults(processes)
    for fault in faults:
        print(f"[gpu-rehearse] FAULT: {fault}")
    print(f"[gpu-rehearse] {'failed' if faults else 'passed'}; results in {out.relative_to(ROOT)}")
    return int(bool(faults))


def make_machine(python312: str) -> None:
    """Make the environment of the GPU machine, unless it is there with the packages listed."""
    mark = MACHINE / ".packages"
    digest = hashlib.sha256(PACKAGES.read_bytes()).hexdigest()
    if mark.exists() and mark.read_text() == digest:
        return
    version = "import sys; sys.exit(sys.version_info[:2] != (3, 12))"
    if not shutil.which(python312) or subprocess.run([python312, "-c", version], capture_output=True).returncode:
        sys.exit(f"{python312} is no Python 3.12, which the GPU machine has: make PYTHON312=/path/to/python3.12 ...")
    print(f"[gpu-rehearse] the machine's packages in {MACHINE.relative_to(ROOT)}, 0.8 GB to download", flush=True)
    shutil.rmtree(MACHINE, ignore_errors=True)
    subprocess.run([python312, "-m", "venv", MACHINE], check=True)
    install("-r", str(PACKAGES))
    mark.write_text(digest)


def install(*arguments: str) -> None:
    """Install packages without their dependencies by the machine's pip."""
    pip = [MACHINE / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, *arguments], check=True)


def make_libraries() -> None:
    """Build the pretended device's libraries from the symbols of torch and of the bundle's vLLM."""
    if not (BUILD / "site" / "vllm").exists():
        sys.exit("[gpu-rehearse] build/gpu/site has no vLLM: remove build/gpu/bundle and run `make gpu-bundle`")
    packages = MACHINE / "lib" / "python3.12" / "site-packages"
    objects = [*(packages / "torch" / "lib").glob("*.so*"), *(BUILD / "site" / "vllm").rglob("*.so")]
    sources = sorted((Path(__file__).parent / "pretend").glob("*.[chp]*"))
    digest = hashlib.sha256()
    for path in (*sources, PACKAGES, PACKAGES.with_name("packages.txt")):
        digest.update(path.read_bytes())
    mark = PRETEND / ".built"
    if mark.exists() and mark.read_text() == digest.hexdigest():
        return
    if not HEADERS.exists():
        install("--target", str(HEADERS), *CUDA_HEADERS)
    triton = packages / "triton" / "backends" / "nvidia"
    build(PRETEND, objects, [triton / "driver.c", triton / "driver.py"], [HEADERS / "nvidia" / "cu13" / "include"])
    mark.write_text(digest.hexdigest())


def environment(out: Path, records: Path) -> dict[str, str]:
    """Return the environment in which the pretended device is found; no cache is read but those of the rehearsal."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "VLLM_", "KVPOP_", "MAKE"))
    }
    return clean | {
        "KVPOP_GPU_WORK": str(REHEARSAL / "work"),
        "LD_LIBRARY_PATH": str(PRETEND),
        "OMP_NUM_THREADS": "1",
        "OUT": str(out),
        "PRETEND_RECORDS": str(records),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(Path(__file__).parent / "pretend"),
        "TRITON_LIBCUDA_PATH": str(PRETEND),
    }


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


def write_steps(processes: list[dict], path: Path) -> None:
    """Write and print host time and counts of engine steps: medians, and the range of times."""
    rows = []
    for process in processes:
        for step in process["steps"]:
            if len(step["counts"]) < FEWEST:
                continue
            columns = {name: [counts[name] for counts in step["counts"]] for name in ("seconds", *COUNTED)}
            times = (1e3 * statistic(columns["seconds"]) for statistic in (statistics.median, min, max))
            rows.append(
                (
                    process["name"],
                    *(step[name] for name in ("budget", "kind", "requests", "tokens")),
                    len(step["counts"]),
                )
                + tuple(f"{value:.2f}" for value in times)
                + tuple(f"{statistics.median(columns[name]):g}" for name in COUNTED)
            )
    rows.sort(key=lambda row: (row[2], row[3], row[4], row[0], str(row[1])))
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS + COUNTED, *rows])
    for row in [COLUMNS + COUNTED, *rows] if rows else []:
        print(
            "".join(f"{value!s:>{max(len(name), 7) + 1}}" for name, value in zip(COLUMNS + COUNTED, row, strict=True))
        )


if __name__ == "__main__":
    sys.exit(main())
