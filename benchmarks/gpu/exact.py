"""Serving kernels on a GPU next to the float64 loop and the reference of the tests."""

import copy
from collections.abc import Iterator

import torch
from kernels.problems import CLOSE, CLOSE_MASS, Problem
from kernels.served import Pool

from gpu.sections import Bench, within

CASES = {
    "recency": dict(case="none", sinks=0, window=1, unequal=True),
    "key norm": dict(case="key-norm", group=4),
    "threshold": dict(case="gate_scores-threshold"),
    "own decays": dict(case="gate_scores-ages", unequal=True),
    "linear": dict(case="linear", group=4, size=128),
    "mlp": dict(case="mlp"),
    "mlstm": dict(case="mlstm-norm-skip", group=4, size=128),
    "mlstm, heads of 80": dict(case="mlstm", group=3, size=80),
    "mlstm, corrected": dict(case="mlstm-corrected"),
    "mlstm read at once": dict(case="mlstm-immediate"),
    "mean mass": dict(case="mass-mean", group=3),
    "moments": dict(case="moment-corrected"),
}
"""Name -> fields of a problem."""


def serve_right(bench: Bench, name: str, steps: list[int], **options) -> Iterator[dict]:
    """Check steps of all requests of a problem by the kernels; yield the errors of their outputs.

    The retained tokens after every step must be those of the float64 loop, none of whose decisions may be
    close. Outputs must be as good as the reference's in the same precision.

    Args:
        bench: device and dtype.
        name: problem of :data:`CASES`.
        steps: tokens of a chunk of each request, 0 for a decode step of all.
        options: fields of the problem that differ.
    """
    common = dict(heads=2, size=64, group=2, window=3, topk=13, slots=16, dtype=bench.dtype, q_dtype=bench.dtype)
    length = sum(count or 1 for count in steps)
    for seed in range(20):
        p = Problem(**common | CASES[name] | {"seed": seed} | options, length=length).prepare()
        exact = [p.exact_run(r) for r in range(p.requests)]
        if min(run.margin for run in exact) > (CLOSE_MASS if p.rule.coupled else CLOSE):
            break
    else:
        raise AssertionError("the data of every seed have a close decision")
    with torch.device(bench.device):
        kernel = Pool(on_device(p, bench.device))
    reference, copied, results = Pool(p), Pool(p), []
    for count in steps:
        cuts = [slice(count_seen, count_seen + (count or 1)) for count_seen in reference.lengths]
        wide = zip(*((run.out[cut], run.lse[cut]) for run, cut in zip(exact, cuts, strict=True)), strict=True)
        with torch.device(bench.device):
            kernel_result = step(kernel, count, "triton")
        results.append((kernel_result, tuple(map(torch.cat, wide)), step(reference, count, "reference")))
        copied.pages, copied.lengths = p.layout.view(kernel.pages.raw.cpu()), kernel.lengths
        for r, count_seen in enumerate(copied.lengths):
            assert torch.equal(copied.retained(r), exact[r].retained[:, count_seen - 1, :count_seen]), (
                f"request {r}, {count_seen} tokens"
            )
    yield bench.row("steps with equal sets", len(steps), "count")
    for i, name in enumerate(("out", "lse")):
        three = (torch.cat([result[i].cpu() for result in side]) for side in zip(*results, strict=True))
        yield from within(bench, *three, name, factor=3.0)


def step(pool: Pool, count: int, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and log-sum-exps of a chunk of each request, or of a decode step of all if ``count`` is 0."""
    requests = list(range(pool.p.requests))
    if not count:
        return pool.decode(requests, impl)
    return pool.chunks(dict.fromkeys(requests, count), impl)


def on_device(p: Problem, device: str) -> Problem:
    """Return a problem with its rule, its texts and all of its tensors on a device."""
    moved = copy.copy(p)
    moved.texts = [[text.to(device) for text in texts] for texts in p.texts]
    moved.rule = p.rule.to(device)
    for name, value in vars(p).items():
        if isinstance(value, torch.Tensor):
            setattr(moved, name, value.to(device))
    return moved
