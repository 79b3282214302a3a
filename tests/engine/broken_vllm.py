"""Copies of vLLM in which something is another, and runs of engines and of ``vllm serve`` on them."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
VLLM = Path(find_spec("vllm").origin).parent


def copy(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Make ``folder / "vllm"`` of links to the installed vLLM and of changed files; return ``folder``.

    Args:
        folder: folder to write, to be put in front of Python's path.
        changes: name of a file -> a text in it, and what stands in its place.
    """
    for name, (before, after) in changes.items():
        path = folder / "vllm" / name
        for part in reversed(Path(name).parents):
            _links(VLLM / part, folder / "vllm" / part)
        text = (VLLM / name).read_text()
        assert before in text, f"{name} has no {before}"
        path.unlink()
        path.write_text(text.replace(before, after))
    return folder


def _links(source: Path, target: Path) -> None:
    """Make ``target`` a folder with a link to each entry of ``source``, unless it is one."""
    if target.is_symlink():
        target.unlink()
    if not target.exists():
        target.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that imports the vLLM of a folder."""
    return os.environ | {"PYTHONPATH": f"{folder}:{TESTS}", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def run(folder: Path, model: Path, module: str = "") -> dict:
    """Run a stock engine, and ask for one with a policy, in a process of their own; return its report.

    Args:
        folder: folder of the vLLM.
        model: folder of the model.
        module: module of this package that cannot be imported.
    """
    command = [sys.executable, "-m", "engine.broken_vllm", str(model), str(folder / "report"), module]
    ended = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    warnings = [line for line in (ended.stdout + ended.stderr).splitlines() if "kvpop_vllm does nothing" in line]
    return json.loads((folder / "report").read_text()) | {"warnings": warnings}


def serve(folder: Path, model: Path, *options: str) -> subprocess.CompletedProcess:
    """Run ``vllm serve`` with options that it refuses."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *options]
    return subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=600)


def main(model: str, out: str, module: str) -> None:
    """Write outputs of a stock engine, functions of ours in vLLM, and the refusal of a policy as JSON."""
    if module:
        sys.modules[module] = None
    import vllm
    from engine.stock_run import functions_of_ours_in_vllm
    from engine.tiny_engine import configure, generate

    from kvpop_vllm.config import ConfigError

    report = {"vllm": vllm.__file__, "outputs": generate(model, None, tokens=4)}
    report["ours"] = functions_of_ours_in_vllm()
    try:
        configure(model, {"policy": "streaming-llm", "budget": 64})
    except ConfigError as error:
        report["refusal"] = str(error)
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
