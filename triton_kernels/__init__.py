"""GPU kernels in Triton, installed as `kvpop_vllm.kernels.triton`: one file per op, named as in kernels/ops.

vLLM looks for a package called `triton_kernels` (of the Triton project) and takes this folder for it when the folder's
parent is on the path; refusing that name makes vLLM see that the other package is not there.
"""

if __name__ == "triton_kernels":
    raise ImportError("this folder is not the package `triton_kernels`; its name is `kvpop_vllm.kernels.triton`")
