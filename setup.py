"""Builds the optional extension `kvpop_vllm._C` and maps triton_kernels/ to `kvpop_vllm.kernels.triton`.

The rest of the metadata is in pyproject.toml. Without torch or GCC (whose vector notation and target pragmas the sources
use) the install succeeds without `_C` and says so; KVPOP_REQUIRE_EXT=1 makes that an error. There is no -march flag: the
sources choose instruction sets at run time.
KVPOP_SANITIZE=1 builds with AddressSanitizer and UBSan into build/sanitized, and never into the source tree.
"""

import os
import sys
from glob import glob

from setuptools import find_packages, setup

REQUIRED = os.environ.get("KVPOP_REQUIRE_EXT") == "1"
# OpenMP is compiled in but not linked: its symbols come from the runtime torch has loaded, so that there is only one
# pool of threads and torch.set_num_threads() holds for our kernels too.
COMPILE_FLAGS = ["-std=c++20", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"]
LINK_FLAGS = []
SANITIZE = os.environ.get("KVPOP_SANITIZE") == "1"
if SANITIZE:
    LINK_FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    COMPILE_FLAGS += [*LINK_FLAGS, "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS"]
    # Python's own flags may hold -fwrapv, which would define signed overflow and so hide it.
    COMPILE_FLAGS += ["-fno-wrapv"]
    # What compiles fastest: no checks of virtual tables, which no class here has, or of sizes, which AddressSanitizer
    # sees; accesses checked by calls instead of code in place; memory instead of garbage collections of the compiler.
    COMPILE_FLAGS += ["-Og", "-g1", "-fno-sanitize=vptr,object-size"]
    COMPILE_FLAGS += ["--param=asan-instrumentation-with-call-threshold=0", "--param=ggc-min-heapsize=500000"]
else:
    COMPILE_FLAGS += ["-O3", "-g0"]


def not_built(reason):
    """Say that `_C` is left out, or raise where it is required."""
    line = f"kvpop_vllm._C was not built: {reason}. CPU kernels in C++ will not be available."
    if REQUIRED:
        raise SystemExit(line)
    print(line)


def extension_arguments():
    """`ext_modules` and `cmdclass` for setup(); empty where torch is missing."""
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        not_built("torch is not installed in the build environment (see pip's --no-build-isolation)")
        return {}

    class OptionalBuild(BuildExtension):
        """A failing compiler leaves the extension out instead of failing the install."""

        def finalize_options(self):
            """Keep the objects in build/, also under pip, so that only changed sources are compiled again."""
            super().finalize_options()
            self.build_temp = os.path.join("build", f"{sys.implementation.cache_tag}-torch-{torch.__version__}")
            if SANITIZE:
                self.build_temp += "-sanitized"
                self.build_lib, self.inplace = os.path.join("build", "sanitized"), False

        def run(self):
            try:
                super().run()
            except (Exception, SystemExit) as error:
                self.remove_stale()
                not_built((str(error).strip() or type(error).__name__).splitlines()[-1])
                self.extensions = []

        def remove_stale(self):
            """An earlier build in the same place must not pass for the one that failed."""
            for path in glob(os.path.join(self.build_lib if SANITIZE else "", "kvpop_vllm", "_C*.so")):
                os.remove(path)

    extension = CppExtension(
        "kvpop_vllm._C",
        sources=["csrc/bindings.cpp", *sorted(glob("csrc/cpu/*.cpp"))],
        include_dirs=[os.path.join(os.path.dirname(os.path.abspath(__file__)), "csrc", "include")],
        depends=sorted(glob("csrc/include/**/*.h", recursive=True)),
        extra_compile_args=COMPILE_FLAGS,
        extra_link_args=LINK_FLAGS,
    )
    return {"ext_modules": [extension], "cmdclass": {"build_ext": OptionalBuild}}


triton = ["kvpop_vllm.kernels.triton"] if os.path.isdir("triton_kernels") else []
setup(
    packages=[*find_packages(include=["kvpop_vllm", "kvpop_vllm.*"]), *triton],
    package_dir={"kvpop_vllm.kernels.triton": "triton_kernels"},
    **extension_arguments(),
)
