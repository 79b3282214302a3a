"""GPU kernels in Triton, installed as `kvpop_vllm.kernels.triton`: one file per op, named as in kernels/ops.

vLLM looks for a package `triton_kernels` of the Triton project. If it finds this folder on the path instead, the error
tells it that the other package is not installed. docs/kernels.md says for which shapes kernels' times are reckoned.
"""

if __name__ == "triton_kernels":
    raise ImportError("this folder is not the package `triton_kernels`; its name is `kvpop_vllm.kernels.triton`")
