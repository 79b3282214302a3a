"""Reads thousands of damaged files that this package writes, of five kinds: each is read, or refused in one line.

Usage: ``python tests/stress/fuzz_files.py [--files 10000] [--seed 0]``. Every file begins as one that this package
wrote. hypothesis then changes bytes, cuts, repeats and inserts parts, or puts other JSON values in place of some. A
reader must return or raise a ConfigError of one line, within --seconds and --gigabytes. Anything else ends the run:
hypothesis prints the smallest damage that it found. A crash of the process is reported with the file that was read.
"""

import argparse
import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from kvpop_vllm.argument_types import positive
from kvpop_vllm.calibration.shares import Calibration, read_calibration
from kvpop_vllm.compaction.base_model import base_of
from kvpop_vllm.compaction.cartridge import CartridgeConfig, read_cartridge, write_cartridge
from kvpop_vllm.compaction.compactor_files import CompactorConfig, read_compactor, write_compactor
from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.testing.models import write_random_scorer, write_tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import record  # noqa: E402

LAYERS, HEADS = 2, 2
NAMES = "scorer", "cartridge", "compactor", "shares", "calibration"


class Late(BaseException):
    """Error for a reader that takes too long; no reader catches it."""


class Target(NamedTuple):
    """Good folder that is damaged, and its reader."""

    folder: Path
    read: Callable[[Path], object]


def read_shares(file: str) -> None:
    """Read a file of shares, and check it with a model."""
    read_calibration(file).check_model(ModelShape("qwen3", LAYERS, HEADS, 32, 64), file)


def targets_in(root: Path) -> dict[str, Target]:
    """Write a good folder of each kind below ``root`` and return them by name."""
    model = write_tiny_model(root / "model")
    write_random_scorer(root / "scorer", model)
    base = base_of(model)
    shape = base["num_kv_heads"], 64, base["head_dim"]
    layers = [(torch.ones(shape), torch.ones(shape), torch.zeros(shape[:2])) for _ in range(base["num_layers"])]
    about = {"slots": 64, "provenance": {"corpus": {"tokens": 9}}}
    cartridge = base | about | {"next_position": 70, "method": "first", "head": [1, 2]}
    write_cartridge(root / "cartridge", CartridgeConfig(**cartridge), layers)
    compactor = CompactorConfig(**(base | about), width=8)
    write_compactor(root / "compactor", compactor, compactor.build())
    (root / "shares").mkdir()
    (root / "shares" / "heads.json").write_text(json.dumps({"shares": [[1, 2.5], [0.5, 1]], "note": "x"}))
    (root / "calibration").mkdir()
    sizes = {name: base[name] for name in ("model_type", "num_layers", "num_kv_heads", "head_dim")}
    shares = {"unit": "head", "shares": ((1.0, 2.5), (0.5, 0.0)), "windows": {"streaming-llm": 0.0625}}
    Calibration(**sizes, **shares, rope={}, policy="streaming-llm", budget=512).write(root / "calibration")
    return {
        "scorer": Target(root / "scorer", read_scorer),
        "cartridge": Target(root / "cartridge", read_cartridge),
        "compactor": Target(root / "compactor", lambda folder: read_compactor(folder, model)),
        "shares": Target(root / "shares", lambda folder: read_shares(str(folder / "heads.json"))),
        "calibration": Target(root / "calibration", lambda folder: read_calibration(str(folder))),
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
BYTES = st.binary(max_size=12) | st.sampled_from(
    [b"[" * 100_000, b'{"a":' * 50_000, b"NaN", b"-1", b"9" * 5000, b"\n\n"]
)
EDITS = st.one_of(
    st.tuples(st.just("json"), st.integers(0, 99), JSON),
    st.tuples(st.just("put"), st.floats(0, 1), BYTES),
    st.tuples(st.just("over"), st.floats(0, 0.05) | st.floats(0, 1), BYTES),
    st.tuples(st.just("cut"), st.floats(0, 1), st.floats(0, 1)),
    st.tuples(st.just("twice"), st.floats(0, 1), st.floats(0, 1)),
    st.tuples(st.just("whole"), st.just(0), BYTES | st.just(b"\x80\x04N.") | st.just(b"PK\x03\x04")),
)
"""Changes of one file: kind, place and content."""


def places(value: object) -> Iterator[tuple]:
    """Yield (container, key) of each value within a JSON value."""
    for key in list(value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()):
        yield value, key
        yield from places(value[key])


def edited(content: bytes, edit: tuple) -> bytes:
    """Return a file's content after one of EDITS; a safetensors header counts as JSON."""
    kind, place, new = edit
    if kind == "json":
        head = 8 if content[:1] != b"{" else 0
        size = int.from_bytes(content[:8], "little") if head else len(content)
        try:
            value = json.loads(content[head : head + size])
            spots = list(places(value))
            owner, key = spots[place % len(spots)]
            owner[key] = new
            text = json.dumps(value).encode()
        except (ValueError, ZeroDivisionError, RecursionError):
            return content
        return (len(text).to_bytes(8, "little") if head else b"") + text + content[head + size :]
    if kind == "whole":
        return new
    begin = int(place * len(content))
    if kind in ("put", "over"):
        return content[:begin] + new + content[begin + (len(new) if kind == "over" else 0) :]
    end = max(begin, int(new * len(content)))
    return content[:begin] + (content[begin:end] * 2 if kind == "twice" else b"") + content[end:]


@contextmanager
def time_limit(seconds: int):
    """Raise :class:`Late` in the block, or at its end, after so many seconds of CPU time."""
    began, message = time.process_time(), f"a reader took more than {seconds} s"

    def late(*_):
        raise Late(message)

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if time.process_time() - began > seconds:  # an exception from a signal is lost in a destructor
        late()


def check(target: Target, folder: Path, name: str, edits: list[tuple], seconds: int) -> bool:
    """Damage a file, read the folder, and return whether it was refused.

    Raises:
        AssertionError: the refusal has no line, or several.
        Exception: any other error of the reader.
    """
    content = (target.folder / name).read_bytes()
    for edit in edits:
        content = edited(content, edit)
    (folder / name).write_bytes(content)
    try:
        with time_limit(seconds):
            target.read(folder)
        return False
    except ConfigError as error:
        assert str(error).strip() and len(str(error).splitlines()) == 1, f"not one line: {str(error)[:300]!r}"
        return True
    finally:
        shutil.copyfile(target.folder / name, folder / name)


def fuzz(kind: str, root: Path, options) -> None:
    """Damage the files of one kind and print how many were refused."""
    target, folder = targets_in(root)[kind], root / "damaged"
    shutil.copytree(target.folder, folder)
    names, counts = sorted(path.name for path in folder.iterdir()), [0, 0]
    room = options.gigabytes << 30
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))

    @seeded(options.seed)
    @settings(
        max_examples=options.files,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.sampled_from(names), st.lists(EDITS, min_size=1, max_size=3))
    def run(name, edits):
        counts[check(target, folder, name, edits, options.seconds)] += 1

    run()
    print(f"{kind}: {sum(counts)} files, {counts[1]} refused, {counts[0]} read", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--files", type=positive, default=10_000, help="damaged files, over all kinds")
    parser.add_argument("--seed", type=int, default=0, help="of the damages")
    parser.add_argument("--seconds", type=positive, default=10, help="most seconds of CPU time for one file")
    parser.add_argument("--gigabytes", type=positive, default=1, help="most memory in addition to that of the imports")
    parser.add_argument("--kind", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.kind:
        options.root.mkdir()
        fuzz(options.kind, options.root, options)
        return 0
    common = [f"--{name}={getattr(options, name)}" for name in ("seed", "seconds", "gigabytes")]
    common.append(f"--files={-(-options.files // len(NAMES))}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="kvpop-fuzz-") as root:
        for kind in NAMES:
            command = [sys.executable, __file__, *common, f"--kind={kind}", f"--root={root}/{kind}"]
            code = subprocess.run(command).returncode
            if code < 0:
                copy = Path(tempfile.mkdtemp(prefix=f"kvpop-fuzz-{kind}-"))
                shutil.copytree(f"{root}/{kind}/damaged", copy, dirs_exist_ok=True)
                print(f"{kind}: the process died of signal {-code} while it read {copy}", file=sys.stderr)
            failed += code != 0
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
