"""GPU kernels in Triton, installed as `kvpop_vllm.kernels.triton`: one file per op, named as in kernels/ops.

vLLM looks for a package named `triton_kernels` (of the Triton project). If the parent of this folder is on
the path, vLLM imports this folder instead. The error below lets vLLM detect that the other package is not
installed.

Docstrings of kernels name the axes of the grid, the bytes that a launch moves to and from memory, and the time. These
are reckoned, not measured: for a layer of Qwen3-8B (D = 128, H = 8, G = 4, N = 64, B = 4,096, bfloat16, KVpop's mLSTM
with F = Dv = 128) on an H200 at 3.6 TB/s, 75% of its bandwidth, and 495 TFLOP/s, half of its most, or 247 in TF32.
Those of decoding are of one request, those of prefill and training of S = 8,192 tokens, and in prefill behind a full
cache.
"""

if __name__ == "triton_kernels":
    raise ImportError("this folder is not the package `triton_kernels`; its name is `kvpop_vllm.kernels.triton`")
