"""GPU kernels in Triton, installed as `kvpop_vllm.kernels.triton`: one file per op, named as in kernels/ops.

vLLM looks for a package named `triton_kernels` (of the Triton project). If the parent of this folder is on
the path, vLLM imports this folder instead. The error below lets vLLM detect that the other package is not
installed.
"""

if __name__ == "triton_kernels":
    raise ImportError("this folder is not the package `triton_kernels`; its name is `kvpop_vllm.kernels.triton`")
