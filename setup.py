"""Build the optional extension ``kvpop_vllm._C`` and map triton_kernels/ to ``kvpop_vllm.kernels.triton``.

The rest of the metadata is in pyproject.toml. The sources need GCC, whose vector extensions and target
pragmas they use. Without torch or GCC the install succeeds without ``_C`` and prints a message;
KVPOP_REQUIRE_EXT=1 makes that an error. There is no -march flag, because the sources select instruction sets
at run time. KVPOP_SANITIZE=1 builds with AddressSanitizer and UBSan into build/sanitized, and never into the
source tree.
"""

import os
import sys
from glob import glob

from setuptools import find_packages, setup

REQUIRED = os.environ.get("KVPOP_REQUIRE_EXT") == "1"
# OpenMP is compiled in but not linked. Its symbols come from the runtime that torch has loaded, so that
# there is one thread pool and torch.set_num_threads() applies to these kernels too.
COMPILE_FLAGS = ["-std=c++20", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"]
LINK_FLAGS = []
SANITIZE = os.environ.get("KVPOP_SANITIZE") == "1"
if SANITIZE:
    LINK_FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    COMPILE_FLAGS += [*LINK_FLAGS, "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS"]
    # Python's own flags may contain -fwrapv, which defines signed overflow and so hides it.
    COMPILE_FLAGS += ["-fno-wrapv"]
    # These flags compile fastest. They omit checks of virtual tables, which no class here has, and of object
    # sizes, which AddressSanitizer covers. Accesses are checked by calls instead of inline code. The compiler
    # uses more memory and collects garbage less often.
    COMPILE_FLAGS += ["-Og", "-g1", "-fno-sanitize=vptr,object-size"]
    COMPILE_FLAGS += ["--param=asan-instrumentation-with-call-threshold=0", "--param=ggc-min-heapsize=500000"]
else:
    COMPILE_FLAGS += ["-O3", "-g0"]


def not_built(reason):
    """Print that ``_C`` is left out, or exit with an error if it is required."""
    line = f"kvpop_vllm._C was not built: {reason}. CPU kernels in C++ will not be available."
    if REQUIRED:
        raise SystemExit(line)
    print(line)


def extension_arguments():
    """Return ``ext_modules`` and ``cmdclass`` for setup(), empty if torch is missing."""
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        not_built("torch is not installed in the build environment (see pip's --no-build-isolation)")
        return {}

    class OptionalBuild(BuildExtension):
        """Build command that leaves the extension out if it fails to compile."""

        def finalize_options(self):
            """Keep object files in build/, also under pip, so that only changed sources are recompiled."""
            super().finalize_options()
            self.build_temp = os.path.join("build", f"{sys.implementation.cache_tag}-torch-{torch.__version__}")
            if SANITIZE:
                self.build_temp += "-sanitized"
                self.build_lib, self.inplace = os.path.join("build", "sanitized"), False

        def run(self):
            """Build the extension, or leave it out."""
            try:
                super().run()
            except (Exception, SystemExit) as error:
                self.remove_stale()
                not_built((str(error).strip() or type(error).__name__).splitlines()[-1])
                self.extensions = []

        def remove_stale(self):
            """Remove an earlier build, so that it is not used in place of the failed one."""
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
