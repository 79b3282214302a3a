"""`kvpop calibrate`: runs the stages, writes the folder, and prints the report."""

import contextlib
import json
import shlex
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from kvpop_vllm import __version__, policies
from kvpop_vllm.calibrate.layers import POSITIONS, layer_measures, variants_at_once
from kvpop_vllm.calibrate.passes import DENSE_BYTES, EQUAL, Passes
from kvpop_vllm.calibrate.plan import FURTHER, Options, Plan
from kvpop_vllm.calibrate.records import Records
from kvpop_vllm.calibrate.stages import Stages, Verdict
from kvpop_vllm.calibrate.statistics import query_statistics
from kvpop_vllm.calibration.shares import NAME as SHARES_NAME
from kvpop_vllm.calibration.shares import SIZES, UNITS, Calibration, has_shares, read_calibration
from kvpop_vllm.calibration.statistics import read_statistics, write_statistics
from kvpop_vllm.config import AUTO, ConfigError
from kvpop_vllm.distill.run import default_device
from kvpop_vllm.evaluation.output import format_table, note, note_kernels
from kvpop_vllm.files import write_whole
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.policies.base import Order
from kvpop_vllm.progress import progress
from kvpop_vllm.scorers.checkpoint import write_shares

COLUMNS = "policy", "budget", "window", "shares", "kl", "over equal", "MiB", "prefill"
PASSAGES = "separate passages: there are fewer than 8 documents to judge by"


def calibrate(options: Options) -> dict:
    """Calibrate a model, write the folder, print the report and return it."""
    plan, out = Plan(options), Path(options.out)
    if not plan.text.by_document:
        note(f"intervals are over {PASSAGES}")
    note_kernels()
    model, began = _loaded(plan), time.process_time()
    records = Records(out, plan.settings)
    _remove_damaged_shares(out)
    _write_statistics(plan, model, out)
    passes = Passes(model, plan.shape, plan.specs, options.protect, plan.stride, records)
    with progress(plan.replays + plan.passes, "calibrate") as tick:
        stages = Stages(plan, model, records, passes, tick)
        table = stages.search(*stages.curves())
        windows = {name: stages.windows(name) for name in dict.fromkeys((EQUAL, table))}
        verdict = stages.judge(table, windows)
    served_table = table if verdict.better else EQUAL
    calibration = recommended(plan, verdict, passes.tables[served_table].tolist(), windows[served_table])
    report = {
        "model": options.model,
        "kvpop": __version__,
        "text": plan.text.source,
        "length": plan.length,
        "rows measured": len(plan.text.measured),
        "rows to judge by": len(plan.text.held_out),
        "intervals over": "documents" if plan.text.by_document else PASSAGES,
        "shares": calibration.unit,
        "decided by": calibration.decided_by,
        "rounds": plan.rounds,
        "table": table,
        "cpu seconds": round(time.process_time() - began, 1),
        "lines": verdict.lines,
        "command": command(options, calibration),
    }
    write_whole(out / "report.json", json.dumps(report, indent=1) + "\n")
    calibration.write(out)
    if options.scorer is not None and calibration.shares is not None:
        write_shares(options.scorer, calibration.shares)
    print(format_table(verdict.lines, COLUMNS))
    print(
        f"text: {report['text']}\nintervals over {report['intervals over']}\nshares: {_shares_line(plan, calibration)}"
    )
    print(report["command"], flush=True)
    if policies.get(calibration.policy).order is Order.ROUNDS:
        note(f"no GPU has run {calibration.policy}: for a server with a GPU calibrate with --policies alone")
    return report


def _remove_damaged_shares(out: Path) -> None:
    """Remove a ``shares.json`` that cannot be read: policies with statistics would read it, and it is written again."""
    try:
        _ = has_shares(str(out)) and read_calibration(str(out))
    except ConfigError:
        (out / SHARES_NAME).unlink()


def _write_statistics(plan: Plan, model: torch.nn.Module, out: Path, rows: int | None = None) -> None:
    """Write the statistics of the model's queries that ``triattention`` needs, unless whole ones are there.

    Args:
        plan: what is measured.
        model: the model.
        out: folder to write.
        rows: number of rows that are read, None for all that are measured.

    Raises:
        ConfigError: there are none of this model, and a policy of the report needs them.
    """
    with contextlib.suppress(ConfigError):
        read_statistics(out)
        return
    try:
        write_statistics(out, query_statistics(model, (tokens for tokens, _ in plan.text.measured[:rows])))
    except ConfigError as error:
        if any(spec.calibration for spec in plan.specs.values()):
            raise ConfigError(f"no statistics for {FURTHER}: {error}") from None
        note(f"no statistics for {FURTHER}: {error}")


def _loaded(plan: Plan) -> torch.nn.Module:
    return load_model(plan.options.model, plan.dtype).eval().to(default_device())


def recommended(plan: Plan, verdict: Verdict, shares: list[list[float]], windows: dict[str, float]) -> Calibration:
    """Return the contents of ``shares.json``.

    Recommended is the policy that diverges least at the middle budget, as it is served with the calibration.

    Args:
        plan: what was measured.
        verdict: by rows that were not measured.
        shares: the table that is served, ``[layers][H]``.
        windows: windows of the policies with it.
    """
    served = [
        line
        for line in verdict.lines
        if line["budget"] == plan.budget
        and (line["shares"] != EQUAL) == (verdict.better and plan.takes_shares(line["policy"]))
    ]
    best = min(served, key=lambda line: line["kl"])
    return Calibration(
        **{name: getattr(plan.shape, name) for name in (*SIZES, "layers")},
        rope=plan.shape.rope,
        unit=plan.options.unit if verdict.better else UNITS[0],
        shares=tuple(map(tuple, shares)) if verdict.better else None,
        windows=windows,
        policy=best["policy"],
        budget=best["budget"],
        decided_by=plan.decides if verdict.better else None,
    )


def _shares_line(plan: Plan, calibration: Calibration) -> str:
    """Return what the report says about shares; the policy that decided may not be the one that is recommended."""
    if calibration.shares is None:
        return calibration.unit
    comparison = "" if calibration.policy == plan.decides else f", which diverges more than {calibration.policy}"
    return f"{calibration.unit}, decided by {plan.decides}{comparison}"


def command(options: Options, calibration: Calibration) -> str:
    """Return the command that serves the recommendation."""
    words = ["vllm", "serve", options.model, "--kv-policy", AUTO, "--kv-calibration", options.out]
    if options.scorer is not None and policies.get(calibration.policy).scorer_kind is not None:
        words += ["--kv-scorer", options.scorer]
    words += ["--kv-protect-prompt", "all"] if options.protect else []
    for flag, size in (("--tensor-parallel-size", options.ranks), ("--pipeline-parallel-size", options.stages)):
        words += [flag, str(size)] if size > 1 else []
    if default_device().type == "cpu":
        words += ["--kv-cache-memory-bytes", str(1 << 30)]
    return shlex.join(words)


def dry_run(options: Options) -> None:
    """Print how long a calibration takes, by a few measurements that are not kept, and its memory."""
    with tempfile.TemporaryDirectory() as folder:
        _print_costs(Plan(replace(options, out=folder)))


def _print_costs(plan: Plan) -> None:
    """Print how long a calibration takes at most and its memory. Statistics of queries are left in its folder."""
    model, layer, count = _loaded(plan), plan.shape.num_layers // 2, len(plan.sizes)
    _write_statistics(plan, model, Path(plan.options.out), rows=1)
    passes = Passes(model, plan.shape, plan.specs, plan.options.protect, plan.stride, {})
    stages = Stages(plan, model, {}, passes, None)
    # not timed, because a first pass also allocates
    stages.replay(0)
    began = time.monotonic()
    row = stages.replay(0)
    dense = time.monotonic()
    layer_measures(row, layer, stages.attention(0), plan.sizes)
    replay_time = (time.monotonic() - dense) / plan.layer_cost(layer, count)
    seconds = plan.replays * replay_time
    for name in plan.specs:
        seconds += plan.passes_of(name) * (dense - began) * stages.pass_cost(name)
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    size, shape = weights + memory(plan), plan.shape
    print(
        f"at most about {max(1, round(seconds / 60))} minutes and {size / 2**30:.1f} GiB of memory for {shape.model_layers} layers and rows"
        f" of {plan.length} tokens"
    )


def memory(plan: Plan) -> int:
    """Return the bytes that a calibration needs besides weights, about.

    These are the keys and values of a row in all layers, of a batch of variants in one, the inputs and the attention of
    layers with full attention, hidden states of the variants, logits, and dense predictions of the rows of a search.
    """
    shape, size = plan.shape, torch.empty((), dtype=plan.dtype).element_size()
    variants = variants_at_once(plan.queries, plan.length)
    layer = 2 * plan.length * shape.num_kv_heads * shape.head_dim * size
    inner = (shape.num_layers + 16 * variants) * plan.queries * (shape.hidden_size or 0) * size
    inner += shape.num_layers * plan.queries * (shape.num_heads or shape.num_kv_heads) * shape.head_dim * size
    logits = 4 * plan.vocabulary * (max(plan.queries, 2 * plan.length // plan.stride) + 4 * POSITIONS)
    return layer * (shape.model_layers + 2 * variants) + inner + logits + DENSE_BYTES
