"""`make gpu-bundle`: vLLM and what it imports, packed for a GPU machine that has torch, Triton and transformers.

The machine needs no network and no vLLM. Wheels come from pip, for Python 3.12 on Linux x86-64. Device code that one
Hopper GPU does not need is erased, and modules that serving text never imports are left out. The result is
``site.tar.xz``, and ``caches.tar.xz`` with the kernels that a rehearsal has compiled and with what vLLM has found out
about the models, each with its checksum.
"""

import argparse
import fnmatch
import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.fatbin import erase_other_code

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
BUNDLE = BUILD / "bundle"
CACHES = BUILD / "rehearsal" / "work" / "caches"
"""Caches of the last rehearsal."""
PACKAGES = Path(__file__).with_name("packages.txt")
LIMIT = 62 << 20
"""Bytes that bundle and tracked files may have together."""
PLATFORMS = ("any", *(f"manylinux{tag}_x86_64" for tag in ("1", "2014", *(f"_2_{i}" for i in range(17, 36)))))
ARCHITECTURE = 90
ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
STRIPPED = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so", ATTENTION)
"""Shared objects with device code that serving needs."""
LEFT_OUT = (
    "vllm/_deepselect_C*",
    "vllm/_flashkda_C*",
    "vllm/_flashmla*.so",
    "vllm/_qutlass_C*",
    "vllm/vllm-rs*",
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/kernels/helion/configs/*",
    "vllm/model_executor/layers/fused_moe/configs/*",
    "vllm/model_executor/layers/quantization/utils/configs/*",
    "vllm/entrypoints/*/static/*",
    "*/tests/*",
    "*.pyi",
    "*.cuh",
    "*.js",
    "*.css",
    "*.dist-info/RECORD",
    "*.dist-info/licenses/*",
)
"""Files of wheels that no run imports."""


def main() -> None:
    """Pack one archive, print the size of all, and fail if they are too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", choices=["site", "caches"], help="packages, or what the last rehearsal has left")
    options = parser.parse_args()
    BUNDLE.mkdir(parents=True, exist_ok=True)
    if options.archive == "site":
        make_site(BUILD / "site")
        pack(BUILD / "site", BUNDLE / "site.tar.xz")
    elif not CACHES.exists():
        sys.exit("[gpu-bundle] no rehearsal has compiled kernels: run `make gpu-rehearse`")
    else:
        pack(CACHES, BUNDLE / "caches.tar.xz")
    check_size(BUNDLE)


def make_site(site: Path) -> None:
    """Unpack the packages into a folder and erase the device code that is not needed."""
    wheels = download(BUILD / "wheels")
    shutil.rmtree(site, ignore_errors=True)
    for wheel in wheels:
        unpack(wheel, site)
    for name in STRIPPED:
        of_attention = ("bfloat16_t", (64, 128)) if name == ATTENTION else ()
        kept_bytes, erased_bytes = erase_other_code(site / name, ARCHITECTURE, *of_attention)
        print(f"[gpu-bundle] {name}: {kept_bytes / 1e6:.1f} MB of device code kept, {erased_bytes / 1e6:.1f} MB erased")


def download(folder: Path) -> list[Path]:
    """Return the wheels of all pinned packages, downloaded where they are missing."""
    lines = PACKAGES.read_text().splitlines()
    wheels = []
    for requirement in (line for line in lines if line and not line.startswith("#")):
        name, version = requirement.split("==")
        pattern = f"{name.replace('-', '[-_]')}-{version}-*.whl"
        if not list(folder.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
            command += ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3"]
            command += ["--abi", "none", *(f"--platform={platform}" for platform in PLATFORMS)]
            subprocess.run([*command, "-d", str(folder), requirement], check=True)
        wheels += folder.glob(pattern)
    return wheels


def unpack(wheel: Path, site: Path) -> None:
    """Unpack a wheel's files into a folder, except those that are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT):
                archive.extract(name, site)
    for data in site.glob("*.data/purelib"):
        shutil.copytree(data, site, dirs_exist_ok=True)
    for data in site.glob("*.data"):
        shutil.rmtree(data)


def pack(folder: Path, archive: Path) -> None:
    """Pack a folder's files, in a fixed order and without owners and times, and write the archive's checksum."""

    def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            tar.add(path, str(path.relative_to(folder)), recursive=False, filter=without_owner)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    archive.with_name(f"{archive.name}.sha256").write_text(f"{digest}  {archive.name}\n")


def check_size(bundle: Path) -> None:
    """Print the bytes of tracked files and of each archive, and exit with an error if they exceed the limit."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    sizes = {"tracked files": sum((ROOT / name).lstat().st_size for name in names.decode().split("\0") if name)}
    sizes |= {path.name: path.stat().st_size for path in sorted(bundle.glob("*.xz"))}
    for name, size in sizes.items():
        print(f"[gpu-bundle] {name}: {size / 1e6:.1f} MB")
    total = sum(sizes.values())
    print(f"[gpu-bundle] together {total / 1e6:.1f} MB of at most {LIMIT / 1e6:.1f} MB")
    if total > LIMIT:
        sys.exit("[gpu-bundle] too large: leave files out (LEFT_OUT in benchmarks/gpu/bundle.py)")


if __name__ == "__main__":
    main()
