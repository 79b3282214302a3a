"""Training ops take memory that is linear in the length, also what C++ allocates itself."""

import math
import subprocess
import sys

import pytest
import torch
from kernels.memory import peak_bytes

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.reference import sparse_attention

ROLES = dict(sinks=4, window=64)


def running_topk(length, impl="reference"):
    return ops.running_topk(torch.randn(1, 2, length), **ROLES, topk=length // 4, impl=impl)


def attention(length):
    q, k, v = (torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3))
    order = ops.running_topk(torch.randn(1, 1, length), **ROLES, topk=length // 4)
    ops.sparse_attention(q, k, v, *order, **ROLES, scale=0.25, impl="reference")[0].sum().backward()


def mass(length):
    q, k, lse = torch.randn(1, 1, length, 8), torch.randn(1, 1, length, 8), torch.randn(1, 1, length)
    ops.future_attention_mass(q, k, lse, window=64, scale=0.25, impl="reference")


def exponent(size, short, long) -> float:
    """Return the exponent p of ``size(length)`` ~ length^p: 1 is linear, 2 an S x S array."""
    return math.log(size(long) / size(short)) / math.log(long / short)


@pytest.mark.parametrize(
    "run, short, long",
    [
        (running_topk, 256, 1024),
        (lambda length: running_topk(length, "cpp"), 2048, 16384),
        (attention, 2048, 16384),
        (mass, 2048, 16384),
    ],
    ids=["running_topk", "running_topk in C++", "sparse_attention", "future_attention_mass"],
)
def test_memory_is_linear(run, short, long):
    run(256)
    assert exponent(lambda length: peak_bytes(lambda: run(length)), short, long) < 1.3
    assert sparse_attention.BLOCK < 2048


MANY_HEADS = """
import torch
from kvpop_vllm.kernels import ops

torch.set_num_threads(1)
priority = torch.randn(1, 128, LENGTH, dtype=torch.float64)

def run(length):
    ops.running_topk(priority[..., :length], sinks=4, window=64, topk=length // 4, impl="cpp")

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

run(256)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again
before = resident("VmRSS")
run(LENGTH)
print(resident("VmHWM") - before)
"""


def resident_bytes(length: int) -> int:
    """Return the peak bytes that C++ adds to a new process, whatever allocates them."""
    program = MANY_HEADS.replace("LENGTH", str(length))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_is_linear_with_what_cpp_allocates_itself():
    assert exponent(resident_bytes, 2048, 16384) < 1.1
