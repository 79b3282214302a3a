"""Training ops on a GPU: Triton against the reference (torch on the same GPU) and against FlexAttention.

Prints CSV: forward and backward apart, the best of some runs after a warm-up. Before an implementation is timed its
results, gradients too, are held against the reference in float64; the error allowed is that of an eager computation in
the dtype at hand (kvpop_vllm.testing.ErrorBudget). Where the check fails the row says so and has no time.

    python benchmarks/gpu_training_ops.py > results.csv
"""

import argparse
import csv
import datetime
import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from kvpop_vllm.kernels import ops
from kvpop_vllm.testing import ErrorBudget

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda"
SINKS, WINDOW, HEADS, GROUP = 4, 256, 8, 4
COLUMNS = (
    "gpu", "torch", "triton", "date", "commit", "op", "implementation", "pass", "length", "head_size", "topk", "dtype",
    "check", "ms", "peak_mib",
)  # fmt: skip


class Case(NamedTuple):
    """One op at one size. A run maps inputs to a list of outputs, of which the first is differentiated.

    Attributes:
        inputs: those that require gradients get them.
        exact: the definition, run on float64 inputs.
        eager: an eager computation in the dtype of the inputs, whose error is the measure.
        runs: functions that make the run to be timed (compiling or precomputing what is not part of it).
    """

    inputs: list
    exact: object
    eager: object
    runs: dict


def main() -> int:
    options = parse_arguments()
    if not torch.cuda.is_available():
        sys.exit("gpu_training_ops: this needs a GPU")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for length in options.lengths:
        for size in options.sizes:
            for make in (running_topk, sparse_attention, future_attention_mass, delayed_mlstm):
                if make is running_topk and size != options.sizes[0]:
                    continue  # has no head size
                for row in rows_of(make, length, size, options):
                    writer.writerow(setting() + row)
                    sys.stdout.flush()
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="head sizes (default 64 128)")
    parser.add_argument("--keep", type=float, default=0.25, help="k as a share of the length (default 0.25)")
    parser.add_argument("--repeats", type=int, default=10, help="runs of which the best counts (default 10)")
    parser.add_argument("--slow", type=float, default=1000, help="ms; what takes longer is timed once (default 1000)")
    return parser.parse_args()


@functools.cache
def setting() -> tuple:
    import triton

    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip() or "none"
    gpu = torch.cuda.get_device_name().replace(",", " ")
    return gpu, torch.__version__, triton.__version__, datetime.date.today().isoformat(), commit


def rows_of(make, length, size, options):
    """Rows of one op: for each implementation its passes, with a time where the check went well."""
    topk = int(options.keep * length)
    case = make(length, size, topk)
    dtype = str(case.inputs[0].dtype).removeprefix("torch.")
    passes = ("forward", "backward") if case.inputs[0].requires_grad else ("forward",)
    truth = complete(case.exact, [x.detach().double().requires_grad_(x.requires_grad) for x in case.inputs])
    eager = complete(case.eager, case.inputs)
    for name, make_run in case.runs.items():
        verdict, timed = "passed", {}
        try:
            run = make_run()
            for actual, exact, low in zip(complete(run, case.inputs), truth, eager, strict=True):
                check(actual, exact, low)
            timed = {one: best(work, options) for one, work in zip(passes, works(run, case.inputs), strict=False)}
        except Exception as error:  # of whatever kind: the row says so, the others follow
            verdict = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        for one in passes:
            yield make.__name__, name, one, length, size, topk, dtype, verdict, *timed.get(one, ("", ""))


def complete(run, inputs) -> list:
    """Outputs, and the gradients of the first for a fixed gradient, on the CPU."""
    outputs = run(*inputs)
    if inputs[0].requires_grad:
        grad = draw(9, *outputs[0].shape, dtype=torch.bfloat16).to(outputs[0].dtype)
        outputs = [*outputs, *torch.autograd.grad(outputs[0], inputs, grad)]
    return [x.detach().cpu() for x in outputs]


def check(actual, exact, low) -> None:
    if low.is_floating_point():
        ErrorBudget(exact.double(), low).check(actual)
    elif not torch.equal(actual, low):
        raise AssertionError(f"{int((actual != low).sum())} of {low.numel()} integers differ")


def works(run, inputs):
    """What is timed: the forward, and the backward after one forward."""
    yield lambda: run(*inputs)
    first = run(*inputs)[0]
    grad = torch.randn_like(first)
    yield lambda: torch.autograd.grad(first, inputs, grad, retain_graph=True)


def best(work, options) -> tuple:
    """Milliseconds of the best run, and MiB allocated beyond what was there."""
    once(work)  # compiles
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = [once(work)]
    peak = torch.cuda.max_memory_allocated() - held
    while len(times) < options.repeats and times[0] < options.slow:
        times.append(once(work))
    return f"{min(times):.3f}", f"{peak / 2**20:.1f}"


def once(work) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def draw(seed, *shape, dtype):
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def both(run) -> dict:
    return {impl: functools.partial(run, impl) for impl in ("triton", "reference")}


# ---- the ops ----


def running_topk(length, size, topk) -> Case:
    def run(impl):
        return lambda x: ops.running_topk(x, sinks=SINKS, window=WINDOW, topk=topk, impl=impl)

    priority = draw(0, 1, HEADS, length, dtype=torch.float32)
    return Case([priority], run("reference"), run("reference"), both(run))


@functools.cache
def order(length, topk):
    priority = draw(0, 1, HEADS, length, dtype=torch.float32)
    return ops.running_topk(priority, sinks=SINKS, window=WINDOW, topk=topk, impl="reference")


def attention_inputs(length, size):
    q = draw(1, 1, HEADS * GROUP, length, size, dtype=torch.bfloat16)
    return q, *(draw(i, 1, HEADS, length, size, dtype=torch.bfloat16) for i in (2, 3))


def sparse_attention(length, size, topk) -> Case:
    rank, cutoff = order(length, topk)
    scale = size**-0.5

    def run(impl):
        return lambda *x: ops.sparse_attention(
            *x, rank, cutoff, sinks=SINKS, window=WINDOW, scale=scale, impl=impl
        )  # fmt: skip

    def visible(b, h, q, t):
        return ((t < SINKS) | (t > q - WINDOW) | (rank[b, h, t] <= cutoff[b, h, q])) & (t <= q)

    def one_head(q, k, v, h):
        """A masked softmax, S x S, of the query heads of one KV head."""
        place = torch.arange(length, device=DEVICE)
        mask = visible(0, h, place.unsqueeze(1), place)
        logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
        return logits.softmax(-1) @ v, logits.logsumexp(-1)

    def eager(q, k, v):
        heads = zip(q.split(GROUP, 1), k.split(1, 1), v.split(1, 1), range(HEADS), strict=True)
        parts = [checkpoint(one_head, *head, use_reentrant=False) for head in heads]
        return [torch.cat(x, 1) for x in zip(*parts, strict=True)]

    def flex():
        from torch.nn.attention.flex_attention import create_block_mask

        blocks = create_block_mask(
            lambda b, h, q, t: visible(b, h // GROUP, q, t),
            1,
            HEADS * GROUP,
            length,
            length,
            device=DEVICE,
            _compile=True,
        )
        return lambda q, k, v: flex_attention(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True)

    inputs = [x.requires_grad_() for x in attention_inputs(length, size)]
    return Case(inputs, run("reference"), eager, both(run) | {"flex_attention": flex})


def future_attention_mass(length, size, topk) -> Case:
    q, k, v = attention_inputs(length, size)
    rank, cutoff = order(length, topk)
    options = dict(window=WINDOW, scale=size**-0.5)
    lse = ops.sparse_attention(q, k, v, rank, cutoff, sinks=SINKS, **options, impl="reference")[1]

    def run(impl):
        return lambda *x: [ops.future_attention_mass(*x, **options, impl=impl)]

    def flex():
        """Keys as queries and queries as keys, -lse as a score modifier; the output it computes too is not used."""
        from torch.nn.attention.flex_attention import create_block_mask

        blocks = create_block_mask(
            lambda b, h, t, d: d >= t + WINDOW, None, None, length, length, device=DEVICE, _compile=True
        )

        def mass(q, k, lse):
            return flex_attention(
                k.repeat_interleave(GROUP, 1), q, q, score_mod=lambda score, b, h, t, d: score - lse[b, h, d],
                block_mask=blocks, scale=options["scale"],
            )[1:]  # fmt: skip

        return mass

    return Case([q, k, lse], run("reference"), run("reference"), both(run) | {"flex_attention": flex})


def flex_attention(q, k, v, **options) -> list:
    """out and lse of the compiled FlexAttention, whichever way this version of torch returns the latter."""
    from torch.nn.attention import flex_attention as module

    if hasattr(module, "AuxRequest"):
        out, aux = compiled_flex()(q, k, v, **options, return_aux=module.AuxRequest(lse=True))
        return [out, aux.lse]
    return list(compiled_flex()(q, k, v, **options, return_lse=True))


@functools.cache
def compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention as plain

    return torch.compile(plain, dynamic=False)


def delayed_mlstm(length, size, topk) -> Case:
    def run(impl):
        return lambda *x: [ops.delayed_mlstm(*x, delay=WINDOW, impl=impl)[0]]

    q, k = (draw(i, 1, HEADS, length, size, dtype=torch.float32).softmax(-1) for i in (1, 2))
    v = draw(3, 1, HEADS, length, size, dtype=torch.float32)
    igate, fgate = (draw(i, 1, HEADS, length, dtype=torch.float32) + c for i, c in ((4, 0), (5, 4)))
    inputs = [x.requires_grad_() for x in (q, k, v, igate, fgate)]
    return Case(inputs, run("reference"), run("reference"), both(run))


if __name__ == "__main__":
    sys.exit(main())
