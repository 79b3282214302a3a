"""Builds the pretended H100's libraries from their C sources and from what torch and vLLM look up in them."""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).parent
WRITTEN = {"libcuda.so.1": "driver.c", "libcudart.so.13": "runtime.c", "libnvidia-ml.so.1": "management.c"}
"""Libraries with a source of their own; the others are compiled from ``libraries.c``."""
PREFIXES = {
    "libcuda.so.1": "cu(?!File)[A-Z]",
    "libcudart.so.13": "cuda[A-Z]|__cuda",
    "libcublas.so.13": "cublas(?!Lt)",
    "libcublasLt.so.13": "cublasLt",
    "libcudnn.so.9": "cudnn",
    "libcufft.so.12": "cufft",
    "libcufile.so.0": "cuFile",
    "libcupti.so.13": "cupti",
    "libcurand.so.10": "curand",
    "libcusolver.so.12": "cusolver",
    "libcusparse.so.12": "cusparse(?!Lt)",
    "libcusparseLt.so.0": "cusparseLt",
    "libnccl.so.2": "p?nccl",
    "libnvJitLink.so.13": "nvJitLink|__nvJitLink",
    "libnvidia-ml.so.1": "nvml",
    "libnvrtc.so.13": "nvrtc",
    "libnvshmem_host.so.3": "nvshmem",
}
"""Libraries, and the beginnings of the names that belong to them where a symbol has no version."""
VERSION_NEED = re.compile(r"File: (\S+) +Cnt|Name: (\S+) +Flags")


def build(out: Path, objects: list[Path], texts: list[Path], headers: list[Path]) -> None:
    """Build all libraries.

    Args:
        out: folder of the libraries.
        objects: shared objects of torch and vLLM; every undefined symbol of theirs that is CUDA's gets a function.
        texts: sources and shared objects that look up the driver's and the management library's functions by name.
        headers: folders of CUDA's headers.
    """
    out.mkdir(parents=True, exist_ok=True)
    names, versions = lookups(objects)
    for text in texts:
        content = text.read_bytes()
        names["libcuda.so.1"] |= {name.decode() for name in re.findall(rb"\bcu[A-Z]\w+", content)}
        names["libnvidia-ml.so.1"] |= {name.decode() for name in re.findall(rb"\bnvml[A-Z]\w+", content)}
    for library in PREFIXES:
        compile_library(out, library, names[library], versions.get(library), headers)
    link = out / "libcuda.so"
    if not link.is_symlink():
        link.symlink_to("libcuda.so.1")


def lookups(objects: list[Path]) -> tuple[dict[str, set[str]], dict[str, str]]:
    """Return the names that objects look up in each library, and the version of a library's symbols."""
    names, versions = defaultdict(set), {}
    for path in objects:
        owners, owner = {}, ""
        for file, version in VERSION_NEED.findall(output("readelf", "-VW", path)):
            owner = file or owner
            owners[version] = owner
        for line in output("nm", "-D", "--undefined-only", path).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            library = owners.get(version.lstrip("@")) if version else library_of(symbol)
            if library in PREFIXES:
                names[library].add(symbol)
                if version:
                    versions[library] = version.lstrip("@")
    return names, versions


def library_of(symbol: str) -> str | None:
    """Return the library that an unversioned symbol belongs to, or None."""
    return next((library for library, prefix in PREFIXES.items() if re.match(prefix, symbol)), None)


def compile_library(out: Path, library: str, names: set[str], version: str | None, headers: list[Path]) -> None:
    """Compile a library: its source, and a function that succeeds for every other name."""
    source = SOURCES / WRITTEN.get(library, "libraries.c")
    stubs, exports = out / f"{library}.c", out / f"{library}.map"
    weak = "__attribute__((weak)) long {}(void) {{ return 0; }}\n"
    stubs.write_text("".join(weak.format(name) for name in sorted(names)))
    macro = re.sub(r"_host$", "", library.removeprefix("lib").split(".")[0]).upper().replace("-", "_")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-fno-builtin", f"-D{macro}", f"-Wl,-soname,{library}"]
    command += [*(f"-I{folder}" for folder in headers), "-o", out / library, source, stubs]
    if version:
        exports.write_text(f"{version} {{ global: *; }};\n")
        command += [f"-Wl,--version-script={exports}"]
    if library != "libcuda.so.1":
        command += [f"-L{out}", "-Wl,--no-as-needed", "-l:libcuda.so.1"]
    subprocess.run([*map(str, command), "-ldl", "-lpthread"], check=True)


def output(*command) -> str:
    """Return what a command prints."""
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout
