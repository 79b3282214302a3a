"""Resources that Triton's kernels take of a GPU that need not be present.

The process compiles the kernels through their own launches. ``python tests/kernels/triton_resources.py``
prints registers, bytes of stack and of shared memory, whether products and sums may be fused, and the waits for
loads within loops, of every kernel on sm_80 and sm_90 in all dtypes with heads of 64 and 128. ``--op`` prints
one op alone (of prefill its own kernels only; ``prefix`` is a decode step after a protected prefix, ``biased`` are
attention's kernels after a prefix with biases, for sm_100 too, ``large`` kernels with heads of 512), ``--json few``
what tests look at. For a decode step and a prefill it also records launches and the torch ops that ran, and for these
and the beginning of a tail the reads of a tensor's values.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernels.factories import given_scores, poisoned_pages  # noqa: E402
from kernels.problems import Problem  # noqa: E402

from kvpop_vllm.cache.chunks import Chunks  # noqa: E402
from kvpop_vllm.cache.device_rows import DeviceRows  # noqa: E402
from kvpop_vllm.cache.pages import Prefix  # noqa: E402
from kvpop_vllm.cache.ranks import Shares  # noqa: E402
from kvpop_vllm.requests import RequestSlots  # noqa: E402

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STEPS = "mlstm-corrected", "moment"
ALL = dict.fromkeys(itertools.product((90, 80), DTYPES, (64, 128)), STEPS)
FEW = {(90, "bfloat16", 128): STEPS, (80, "float32", 128): STEPS, (90, "float16", 64): ("mlstm",)}
"""Cases of decode steps by GPU, dtype and head size."""
BIASED = dict.fromkeys(((100, "bfloat16", 128), *FEW), ("moment", "mlstm"))
"""Cases after prefixes with biases."""
LARGE = dict.fromkeys(((80, "bfloat16", 512), (90, "bfloat16", 512), (100, "bfloat16", 512)), STEPS)
"""Cases with heads of 512."""
TRAINED = "_backward_queries", "_backward_keys", "_mass"
"""Kernels of training alone whose blocks grow with the size of a head."""
OF_LARGE = "_attend", "_attend_keys", "_products", "_residuals", "_steps", *TRAINED
"""Kernels whose blocks grow with the size of a head."""
CHUNKS = {
    "mlstm": 500,
    "gate_scores-ages": 500,
    "mlp": 500,
    "mass-mean": 3,
    "moment-corrected": 3,
    "mlstm-corrected": 3,
}
"""Number of tokens of the prefill chunks of a step by case, or of each chunk if they are processed one by one."""
VERIFIED = dict.fromkeys(FEW, ("mlstm", "mlp"))
"""Cases of verifying steps, of :data:`DRAFTS` drafts."""
DRAFTS = 3
TAILS = "mlstm", "mass-mean"
"""Cases that are also prefilled after a prefix of :data:`PREFIX` tokens."""
PREFIX = 200
OPS = "decode_step", "prefix", "biased", "large", "verify_step", "prefill_chunk", "training"
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "to", "__bool__", "__int__", "__float__", "__index__")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
OWN = (
    "online_topk",
    "_prefill_attend",
    "_prefill_scores",
    "_prefill_slots",
    "_prefill_steps",
    "delayed_mlstm",
    "write_tokens",
    "fill_rows",
)
"""Modules of kernels that only a prefill has, or that precede a step."""
arch, op, launches, compiled = 90, "decode_step", [], {}
launch = JITFunction.run


class Target:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", arch, 32))
    get_current_device = staticmethod(lambda: arch)
    get_current_stream = staticmethod(lambda device: 0)


def compile_only(self, *args, grid, warmup, **options):
    """Compile a kernel once for each combination.

    Kernels that a rule changes most are compiled once for each kind of scorer. Of a prefill only its own are
    compiled.
    """
    launches.append((self.fn.__name__, grid))
    if op == "prefill_chunk" and self.fn.__module__.rpartition(".")[2] not in OWN:
        return
    if op == "biased" and self.fn.__name__ not in ("_attend", "_attend_keys", "_steps"):
        return
    if op == "large" and self.fn.__name__ not in OF_LARGE:
        return
    if op == "training":  # all variants, by their hashes
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled[self.fn.__name__, kernel.hash[:6]] = kernel
        return
    config = options.get("P") or args[-1]
    kind = config.scorer if self.fn.__name__ in ("_evict_and_insert", "_attend", "_steps") else "any"
    if self.fn.__name__ == "_fill":
        kind = "compressed" if args[-2].compresses else "shares"
    if self.fn.__name__ == "_steps" and config.residual:
        kind = "residual"
    if (self.fn.__name__, kind) not in compiled:
        compiled[self.fn.__name__, kind] = launch(self, *args, grid=grid, warmup=True, **options)


def resources(kernel) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        dump = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, stack, _, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", dump.stdout).groups()
    )
    used = {"registers": registers, "stack": stack + local, "shared": kernel.metadata.shared}
    ptx = kernel.asm["ptx"]
    products = len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)", ptx))
    used |= {"fused": kernel.metadata.enable_fp_fusion, "waits": waits(ptx), "products": products}
    used |= {"dependent": kernel.metadata.launch_pdl, "awaits": awaits(ptx)}
    return used | {"ahead": loads_ahead(kernel.asm["ttgir"])}


def awaits(ptx: str) -> bool:
    """Return True if a kernel lets the next launch begin, and waits for the one before ahead of all its loads and stores."""
    allows, waits, touches = (
        match.start() if (match := re.search(pattern, ptx)) else -1
        for pattern in (
            r"griddepcontrol\.launch_dependents\s*;",
            r"griddepcontrol\.wait\s*;",
            r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global|cp\.async|cp\.reduce",
        )
    )
    return 0 <= allows < touches and 0 <= waits < touches


def loads_ahead(ttgir: str) -> int:
    """Return the number of loads ahead of the first loop, asynchronous copies of a pipeline among them."""
    return len(re.findall(r"\btt\.load\b|\basync_copy_global_to_local\b", ttgir.partition("scf.for")[0]))


def waits(ptx: str) -> list[int]:
    """Return how many groups of asynchronous copies are still under way after each wait within a loop."""
    lines, labels, loop_lines = ptx.splitlines(), {}, set()
    for number, line in enumerate(lines):
        if label := re.match(r"(\$L__BB\w+):", line):
            labels[label[1]] = number
        elif (jump := re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", line)) and jump[1] in labels:
            loop_lines |= set(range(labels[jump[1]], number))
    counts = (re.search(r"\bcp\.async\.wait_group\s+(\d+);", lines[number]) for number in sorted(loop_lines))
    return [int(count[1]) for count in counts if count]


class CountedOps(TorchDispatchMode):
    """Mode that records torch's own ops and the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.ops.append((str(func), list(getattr(result, "shape", ()))))
        return result


def serve(case: str, dtype: torch.dtype, size: int) -> list:
    """Return launches and ops of a step of padding and of one of tokens, which must be the same."""
    from kvpop_vllm.kernels.triton import decode_step as module
    from kvpop_vllm.kernels.triton.decode_step import decode_step

    module._dependent = lambda device: arch >= 90

    sizes = dict(requests=3, heads=2, group=4, size=size, slots=64, topk=900)
    p = Problem(case, dtype=dtype, q_dtype=dtype, **sizes).prepare()
    pages, (q, k, v) = poisoned_pages(p.layout, p.num_blocks), p.inputs(range(3))
    steps, gate_scores = [], given_scores(p.rule, k)
    for start in (-1, 8):
        positions, prefix = torch.full((3,), start), None
        if op in ("prefix", "biased"):
            ends = torch.tensor([0, 2 * start, 2500])
            prefix = Prefix(pages, torch.zeros(3, 40, dtype=torch.int32), ends, ends if op == "biased" else None)
        launches.clear()
        options = dict(rule=p.rule, scale=p.scale, gate_scores=gate_scores, prefix=prefix, windows=p.windows)
        options["sink_logits"] = sinks_of(q)
        with noted_reads() as reads, CountedOps() as counted:
            decode_step(q, k, v, pages, p.table, positions, p.budgets, **options)
        assert not reads, f"Tensor.{reads[0]} waits for the device"
        steps.append({"launches": list(launches), "ops": counted.ops})
    return steps


def verify(case: str, dtype: torch.dtype, size: int) -> list:
    """Return launches and ops of a verifying step of padding and of one after a prefix, which must be the same."""
    from kvpop_vllm.kernels.triton import decode_step as module
    from kvpop_vllm.kernels.triton.verify_step import verify_step

    module._dependent = lambda device: arch >= 90
    sizes = dict(requests=3, heads=2, group=4, size=size, slots=64, topk=900, drafts=DRAFTS)
    p, results = Problem(case, dtype=dtype, q_dtype=dtype, **sizes).prepare(), []
    pages, (q, k, v) = poisoned_pages(p.layout, p.num_blocks), (x.repeat(4, 1, 1) for x in p.inputs(range(3)))
    firsts, drafts = 4 * torch.arange(3), torch.full((3,), DRAFTS, dtype=torch.int32)
    prefix = Prefix(pages, torch.zeros(3, 40, dtype=torch.int32), torch.tensor([0, 16, 2500]))
    for start in (-1, 8):
        positions = torch.full((3,), start)
        launches.clear()
        options = dict(rule=p.rule, scale=p.scale, prefix=prefix, windows=p.windows)
        with noted_reads() as reads, CountedOps() as torch_ops:
            verify_step(q, k, v, pages, p.table, positions, firsts, drafts, p.budgets, **options)
        assert not reads, f"Tensor.{reads[0]} waits for the device"
        results.append({"launches": list(launches), "ops": torch_ops.ops})
    return results


def sinks_of(q: torch.Tensor) -> torch.Tensor | None:
    """Return logits of attention sinks, which the op with biases has too."""
    return torch.zeros(q.shape[1]) if op == "biased" else None


@contextmanager
def noted_reads(*of_host: torch.Tensor):
    """Yield a list that receives the names of the reads of tensors, but for those that are on the host on a GPU too."""
    read_names, originals = [], {name: getattr(torch.Tensor, name) for name in READS}
    host = {tensor.untyped_storage().data_ptr() for tensor in of_host}

    def noted(name):
        def read(tensor, *args, **kwargs):
            if tensor.untyped_storage().data_ptr() not in host:
                read_names.append(name)
            return originals[name](tensor, *args, **kwargs)

        return read

    for name in originals:
        setattr(torch.Tensor, name, noted(name))
    try:
        yield read_names
    finally:
        for name, method in originals.items():
            setattr(torch.Tensor, name, method)


def begin(case: str, dtype: torch.dtype, size: int, requests: int) -> dict:
    """Begin tails and return the launches and ops that this took, and the names of the reads."""
    from kvpop_vllm.kernels.triton import delayed_mlstm as module
    from kvpop_vllm.kernels.triton.begin_tail import begin_tail

    module._capability = lambda device: divmod(arch, 10)
    p = Problem(case, requests, group=4, size=size, slots=64, dtype=dtype, q_dtype=dtype).prepare()
    pages, ends = poisoned_pages(p.layout, p.num_blocks), torch.tensor([PREFIX] * (requests - 1) + [2500])
    prefix = Prefix(pages, torch.zeros(requests, 40, dtype=torch.int32), ends)
    launches.clear()
    with noted_reads(ends) as read_names, CountedOps() as counted:
        begin_tail(pages, p.table, prefix, rule=p.rule)
    return {"launches": [n for n, _ in launches], "ops": [n for n, _ in counted.ops], "reads": list(read_names)}


def prefill(case: str, dtype: torch.dtype, size: int, requests: int, protected: int = 0) -> dict:
    """Prefill chunks of some requests after 8 tokens, and ``protected`` ones, in three layers of one step.

    Returns:
        The case, its requests and protected tokens, whether these have a bias, the kernels and ops of each layer, and
        the names of the reads of tensors.
    """
    from kvpop_vllm.kernels.triton import delayed_mlstm as module
    from kvpop_vllm.kernels.triton import prefill_chunk as of_prefill
    from kvpop_vllm.kernels.triton._launch import Recording
    from kvpop_vllm.kernels.triton.fill_rows import fill_rows
    from kvpop_vllm.kernels.triton.prefill_chunk import prefill_chunk
    from kvpop_vllm.kernels.triton.write_tokens import write_tokens

    module._capability = lambda device: divmod(arch, 10)
    # kernels that are compiled take addresses, although these tensors are on the CPU
    of_prefill.Recording = lambda *arguments, interpreted: Recording(*arguments, interpreted=False)
    count, prefix, start = CHUNKS[case], None, 8 + protected
    shape = dict(group=4, size=size, slots=64, window=2, topk=20, dtype=dtype, q_dtype=dtype)
    p = Problem(case, requests, **shape).prepare()
    count = count if p.rule.sequential else count // requests
    pages = poisoned_pages(p.layout, p.num_blocks)
    tokens = torch.full((requests,), protected)
    if protected:
        biased = tokens if op == "biased" else None
        prefix = Prefix(pages, torch.zeros(requests, 4, dtype=torch.int32), tokens, biased)
    q, k, v = (x.repeat(count, 1, 1) for x in p.inputs(range(requests)))
    chunks = Chunks([start] * requests, [count] * requests, p.budgets, [2] * requests)
    options, layers = dict(rule=p.rule, scale=p.scale, gate_scores=given_scores(p.rule, k), prefix=prefix), []
    options["sink_logits"] = sinks_of(q)
    write_tokens(k, v, pages, *torch.zeros(3, len(k), dtype=torch.int64))
    numbers = (torch.zeros(requests + 1, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.int32))
    lengths, places, firsts = numbers
    table, slots = torch.zeros(requests, 20, dtype=torch.int32), RequestSlots(0, 0, 40, 6)
    votes = SimpleNamespace(queries=16, makes_slots=False, adaptive_head_budgets=True)
    rows = DeviceRows(p.layout, slots, requests, 9, Shares(((40, 8), (20, 92))), "cpu", 200)
    fill_rows(rows, requests, lengths, table, places, firsts)
    fill_rows(DeviceRows(p.layout, slots, requests, 9, None, "cpu", 200, votes), requests, lengths, table, places)
    with noted_reads(p.budgets, tokens) as read_names:
        for _ in range(3):
            launches.clear()
            with CountedOps() as counted:
                prefill_chunk(q, k, v, pages, p.table, chunks, **options)
            layers.append({"launches": [name for name, _ in launches], "ops": [name for name, _ in counted.ops]})
    about = {"case": case, "requests": requests, "protected": protected, "biased": op == "biased"}
    return about | {"layers": layers, "reads": read_names}


def train(dtype: torch.dtype, size: int, length: int) -> None:
    """Run the ops of training, forward and backward, and an mLSTM that continues from a state with exact products."""
    from kvpop_vllm.kernels.triton import delayed_mlstm as module
    from kvpop_vllm.kernels.triton.delayed_mlstm import delayed_mlstm
    from kvpop_vllm.kernels.triton.future_attention_mass import future_attention_mass
    from kvpop_vllm.kernels.triton.running_topk import running_topk
    from kvpop_vllm.kernels.triton.sparse_attention import sparse_attention

    module._capability = lambda device: divmod(arch, 10)
    q, k, v = (torch.zeros(1, n, length, size, dtype=dtype, requires_grad=True) for n in (4, 2, 2))
    gates = [torch.zeros(1, 2, length, dtype=dtype, requires_grad=True) for _ in range(2)]
    order = torch.zeros(1, 2, length, dtype=torch.int32)
    out, lse = sparse_attention(q, k, v, order, order, sinks=4, window=16, scale=0.1)
    out.sum().backward()
    future_attention_mass(q, k, lse, window=16, scale=0.1)
    running_topk(torch.zeros(1, 2, 1100), sinks=4, window=16, topk=[16, 16])
    torch.set_float32_matmul_precision("high")  # as kvpop distill does
    h, _ = delayed_mlstm(q[:, :2], k, v, *gates, delay=16)
    h.sum().backward()
    state = torch.zeros(1, 2, size, size), torch.zeros(1, 2, size), torch.zeros(1, 2)
    torch.set_float32_matmul_precision("highest")
    delayed_mlstm(q[:, :2], k, v, *gates, delay=0, state=state)


def rows_of(dtype: str, size: int, steps: tuple[str, ...], notes: dict) -> list[dict]:
    """Return the resources of one op's kernels on one GPU, and add everything else found to ``notes``."""
    compiled.clear()
    if op == "training":
        train(DTYPES[dtype], size, 256 if dtype == "float32" else 77)
    elif op == "prefill_chunk":
        for requests in (1, 5):
            notes["chunks"] += [prefill(case, DTYPES[dtype], size, requests) for case in CHUNKS]
            notes["chunks"] += [prefill(case, DTYPES[dtype], size, requests, PREFIX) for case in TAILS]
        notes["begun"].append([begin(steps[0], DTYPES[dtype], size, requests) for requests in (2, 5)])
    elif op == "large":
        for case in steps:
            serve(case, DTYPES[dtype], size)
        for case in ("mlstm", "moment-corrected"):
            prefill(case, DTYPES[dtype], size, 1)
        train(DTYPES[dtype], size, 77)
    elif op == "verify_step":
        notes["verified"] += [{"case": case, "found": verify(case, DTYPES[dtype], size)} for case in steps]
    else:
        if op == "biased":
            for requests in (1, 5):
                notes["chunks"] += [prefill(case, DTYPES[dtype], size, requests, PREFIX) for case in TAILS]
        notes["steps"] += [{"op": op, "case": case, "found": serve(case, DTYPES[dtype], size)} for case in steps]
    about = {"op": op, "arch": arch, "dtype": dtype, "size": size}
    return [about | {"kernel": n, "scorer": s} | resources(kernel) for (n, s), kernel in compiled.items()]


def cases_of(choice: str | None) -> dict:
    """Return the cases of the current op, by GPU, dtype and head size."""
    if op in ("biased", "large"):
        return BIASED if op == "biased" else LARGE
    if op == "verify_step":
        return VERIFIED if choice == "few" else dict.fromkeys(ALL, VERIFIED[90, "bfloat16", 128])
    return FEW if choice == "few" else ALL


def main():
    global arch, op
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", choices=("few", "all"))
    parser.add_argument("--op", choices=OPS)
    options = parser.parse_args()
    driver.set_active(Target())
    JITFunction.run = compile_only
    report = {"rows": [], "steps": [], "verified": [], "chunks": [], "begun": []}
    for op in [options.op] if options.op else OPS:  # noqa: B007  (read by compile_only, as arch by Target)
        for (arch, dtype, size), steps in cases_of(options.json).items():  # noqa: B007
            if options.json == "few" and op not in ("decode_step", "biased") and size == 64:
                continue
            rows = rows_of(dtype, size, steps, report)
            report["rows"] += rows
            for row in () if options.json else rows:
                print(*row.values(), sep="\t", flush=True)
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
