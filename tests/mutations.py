"""Planted faults that named tests must find: ``make mutations``, or with words that a file or fault must contain.

Each mutation replaces one piece of text, in a copy of the working tree, and runs only the tests that must fail.
It survives if they pass. Mutated C++ is compiled quickly, for the instruction set "baseline" alone where the
text is compiled once per instruction set.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
REFERENCE, KERNELS = "kvpop_vllm/kernels/reference", "kvpop_vllm/kernels"
CPP, TRITON = "csrc", "triton_kernels"
DECODE, PREFILL = "tests/kernels/test_decode_step.py", "tests/kernels/test_prefill_chunk.py"
PREFIX, PRODUCT = "tests/kernels/test_prefix.py", "tests/policies/test_product.py"
SERVING, TRITON_PREFILL = "tests/kernels/test_triton_serving.py", "tests/kernels/test_triton_prefill.py"


class Mutation(NamedTuple):
    """One fault.

    Attributes:
        file: path of the mutated file.
        old: text that occurs once in it.
        new: text that replaces it.
        tests: arguments of pytest that select the tests which must fail.
    """

    file: str
    old: str
    new: str
    tests: str


TABLE = [
    # Reference kernels
    Mutation(
        f"{REFERENCE}/decode_step.py",
        "if len(effective) == 0 or own < float(effective.min()):",
        "if len(effective) == 0 or own <= float(effective.min()):",  # of equal scores the newer leaves
        f"{DECODE} -k 'ties and reference'",
    ),
    Mutation(
        f"{REFERENCE}/decode_step.py",
        "    if q == 0:\n        clear(state)\n",
        "    if q < 0:\n        clear(state)\n",  # the state of the blocks' former request is continued
        f"{PREFILL} -k 'equals_decode and reference and mlstm'",
    ),
    Mutation(
        f"{REFERENCE}/decode_step.py",
        "slots.put_mass(seen, weights[:, len(before[0]) :].mean(0), add=_mean(rule))",
        "slots.put_mass(seen, weights[:, : in_use].mean(0), add=_mean(rule))",  # masses of the prefix
        f"{PREFIX} -k 'however and reference and mass'",
    ),
    Mutation(
        f"{REFERENCE}/decode_step.py",
        "raw, own = raw * (q - positions), own * (q - leaving)",
        "raw, own = raw * (q - positions), own * (q - leaving + 1)",  # the leaving token is a step too old
        f"{PREFILL} -k 'equals_decode and reference and ages'",
    ),
    Mutation(
        f"{REFERENCE}/prefill_chunk.py",
        "visible = (born <= new.unsqueeze(1)) & (new.view(1, -1, 1) < evicted_at.unsqueeze(1))  # [H, l, T]",
        "visible = (born <= new.unsqueeze(1)) & (new.view(1, -1, 1) <= evicted_at.unsqueeze(1))",
        f"{PREFILL} -k 'equals_decode and reference and linear'",
    ),
    Mutation(
        f"{REFERENCE}/prefill_chunk.py",
        "        held.position[:, 0] = seen  # the position field of slot 0 holds tokens_seen\n",
        "        held.position[:, 0] = seen - 1\n",
        f"{PREFILL} -k 'equals_decode and reference and linear'",
    ),
    Mutation(
        f"{REFERENCE}/prefill_chunk.py",
        "None if keys is None else keys[0, heads],",
        "None if keys is None else keys[0, heads * 0],",  # all heads draw as the first one
        "tests/kernels/test_draws.py -k every_implementation",
    ),
    Mutation(
        f"{REFERENCE}/online_topk.py",
        "priority = score.double() - position.double() * log_gamma.unsqueeze(-1)",
        "priority = score.double() + position.double() * log_gamma.unsqueeze(-1)",  # decays grow
        "tests/kernels/test_online_topk.py -k definition",
    ),
    Mutation(
        f"{REFERENCE}/online_topk.py",
        "surplus = (held + step + 1 - topk).clamp_min(0)",
        "surplus = (held + step - topk).clamp_min(0)",  # a slot too many
        "tests/kernels/test_online_topk.py -k definition",
    ),
    Mutation(
        f"{REFERENCE}/running_topk.py",
        "if len(best) > topk:",
        "if len(best) > topk + 1:",
        "tests/kernels/test_running_topk.py -k 'reference'",
    ),
    Mutation(
        f"{REFERENCE}/begin_tail.py",
        "max(0, end - rule.replay), end)",
        "max(0, end - rule.replay - 1), end)",
        "tests/kernels/test_begin_tail.py -k baseline",
    ),
    Mutation(
        f"{REFERENCE}/moments.py",
        "deviation = v - value\n",
        "deviation = v - value * (self.count > 2)\n",  # the second token's deviation is from zero
        f"{PREFIX} -k 'however and reference and moment'",
    ),
    Mutation(
        f"{REFERENCE}/moments.py",
        "self.count = max(0, q - rule.first - rule.first_long) - max(0, in_use - rule.first_long)",
        "self.count = max(0, q - rule.first_long) - max(0, in_use - rule.first_long)",  # the prefix counts
        f"{PREFIX} -k 'however and reference and moment'",
    ),
    Mutation(
        f"{REFERENCE}/scoring.py",
        "return qz + READOUT_EPS * torch.exp(-m.clamp(-60.0, 60.0))",
        "return qz + READOUT_EPS",  # the stabiliser scales epsilon
        "tests/kernels/test_delayed_mlstm.py -k recurrence",
    ),
    Mutation(
        f"{REFERENCE}/sparse_attention.py",
        "near = (t < sinks) | (t > q - window)",
        "near = (t < sinks) | (t >= q - window)",
        "tests/kernels/test_sparse_attention.py -k definition",
    ),
    Mutation(
        f"{REFERENCE}/future_attention_mass.py",
        "outside = outside | (d > earliest + lookahead)",
        "outside = outside | (d >= earliest + lookahead)",
        "tests/kernels/test_future_attention_mass.py -k definition",
    ),
    Mutation(
        f"{REFERENCE}/boundary_loss.py",
        "dropped = torch.where(q == sinks + window + topk, all_of_them, dropped)",
        "dropped = torch.where(q < sinks + window + topk, all_of_them, dropped)",
        "tests/kernels/test_boundary_loss.py -k first_decision",
    ),
    # Shared code of the kernels
    Mutation(
        f"{KERNELS}/rounds.py",
        "if end % m == 0 and end - 1 + m >= full and end > retention.first:",
        "if end % m == 0 and end - 1 + m > full and end > retention.first:",  # the first round is too late
        f"{PRODUCT} -k 'protected_prompts and (vase or rkv)'",
    ),
    Mutation(
        f"{KERNELS}/rounds.py",
        "newest = count - 1 - alike.flip(1).byte().argmax(1)",
        "newest = alike.byte().argmax(1)",  # the oldest alike is spared
        "tests/kernels/test_rounds.py -k resemble",
    ),
    Mutation(
        f"{KERNELS}/draws.py",
        "return mix(mix(seeds + GOLDEN).unsqueeze(-1) + lanes)",
        "return mix(mix(0 * seeds + GOLDEN).unsqueeze(-1) + lanes)",  # seeds are ignored
        "tests/kernels/test_draws.py -k 'definition or seed'",
    ),
    Mutation(
        f"{KERNELS}/divided.py",
        "newest_first = votes.flip(1)\n",
        "newest_first = votes\n",  # of equal votes the older wins
        "tests/kernels/test_divided.py -k division",
    ),
    Mutation(
        f"{KERNELS}/regions.py",
        "return cdiv(pages, self.layers * self.heads)",
        "return pages // (self.layers * self.heads)",  # a page too few
        "tests/kernels/test_regions.py -k regions_of_their_own",
    ),
    Mutation(
        f"{KERNELS}/prefix_attention.py",
        "inside, parts = min(max(protects - start, 0), len(q)), []",
        "inside, parts = min(max(protects - start - 1, 0), len(q)), []",  # the last protected token has a slot
        f"{PREFIX} -k 'however and linear and baseline'",
    ),
    # C++
    Mutation(
        f"{CPP}/include/kvpop/retain.h",
        "(effective < best) | ((effective == best) & (age > best_age))",
        "(effective <= best) | ((effective == best) & (age > best_age))",
        f"{DECODE} -k 'ties and baseline'",
    ),
    Mutation(
        f"{CPP}/include/kvpop/retain.h",
        "if (q == 0) state.reset();",
        "if (q < 0) state.reset();",
        f"{DECODE} -k 'several_tiles and 48'",
    ),
    Mutation(
        f"{CPP}/include/kvpop/retain.h",
        "Moments(a, r, h).take_in(float(evicted + 1), x_u, deviation);",
        "Moments(a, r, h).take_in(float(evicted + 2), x_u, deviation);",
        f"{PREFIX} -k 'however and baseline and moment'",
    ),
    Mutation(
        f"{CPP}/include/kvpop/retain.h",
        "return u >= roles.first_evictable() ? roles.ring_slot(u) : -1;",
        "return u > roles.first_evictable() ? roles.ring_slot(u) : -1;",  # the first token stays in the ring
        f"{PREFIX} -k 'however and baseline and mass'",
    ),
    Mutation(
        f"{CPP}/include/kvpop/retain.h",
        "for (int64_t t = end > replay ? end - replay : 0; t < end; t += BATCH) {",
        "for (int64_t t = end > replay ? end - replay + 1 : 0; t < end; t += BATCH) {",
        "tests/kernels/test_begin_tail.py -k baseline",
    ),
    Mutation(
        f"{CPP}/include/kvpop/score.h",
        "update_row(row, count, keep, gain * key[f], value + c, query[f], numerator + c);",
        "update_row(row, count, keep, gain * key[f], value, query[f], numerator + c);",  # rows over two blocks
        f"{DECODE} -k 'several_tiles and 16'",
    ),
    Mutation(
        f"{CPP}/include/kvpop/attend.h",
        "const float tile_max = max(top[g]), before = s.maximum[g];",
        "const float tile_max = max(top[g]), before = s.maximum[0];",  # the first query head's maximum
        f"{DECODE} -k 'several_tiles and 48'",
    ),
    Mutation(
        f"{CPP}/cpu/prefill_chunk.cpp",
        "for (int64_t t = std::max({piece.a, piece.b - roles_.window, roles_.first_evictable()}); t < piece.b; t++)",
        "for (int64_t t = std::max({piece.a, piece.b - roles_.window + 1, roles_.first_evictable()}); t < piece.b; t++)",
        f"{PREFILL} -k 'equals_decode and baseline and linear'",
    ),
    Mutation(
        f"{CPP}/cpu/prefill_chunk.cpp",
        "const uint64_t key = a_.keys ? a_.draw_key(0, h_) : 0;",
        "const uint64_t key = a_.keys ? a_.draw_key(0, 0) : 0;",  # all heads draw as the first one
        "tests/kernels/test_draws.py -k every_implementation",
    ),
    Mutation(
        f"{CPP}/cpu/prefill_chunk.cpp",
        "work_.gone[at] = int32_t(evicted_at[size_t(i)] - piece.a);",
        "work_.gone[at] = int32_t(evicted_at[size_t(i)] - piece.a) + 1;",  # the evicting query still sees it
        f"{PREFILL} -k 'equals_decode and baseline and linear'",
    ),
    Mutation(
        f"{CPP}/bindings.cpp",
        "step.prefix(r), needed = (protects + step.block_slots - 1) / step.block_slots;",
        "step.prefix(r), needed = protects / step.block_slots;",  # a partial prefix block is not checked
        "tests/kernels/test_prefix_attention.py -k overrun",
    ),
    Mutation(
        f"{CPP}/bindings.cpp",
        "for (int64_t h = 0; q > step.prefix(r) && h < step.heads; h++) {",
        "for (int64_t h = 0; q > step.prefix(r) + 1 && h < step.heads; h++) {",
        f"{PREFIX} -k 'out_of_order and cpp'",
    ),
    # Triton, interpreted
    Mutation(
        f"{TRITON}/_serving_retain.py",
        "return score + (age // P.decay_step).to(tl.float64) * log_gamma",
        "return score + ((age + 1) // P.decay_step).to(tl.float64) * log_gamma",
        f"{DECODE} -k ties",
    ),
    Mutation(
        f"{TRITON}/_lowest_score.py",
        "((effective == best) & (token < oldest))",
        "((effective == best) & (token > oldest))",
        f"{DECODE} -k ties",
    ),
    Mutation(
        f"{TRITON}/_serving_retain.py",
        "tl.store(zero, q + 1)  # tokens_seen",
        "tl.store(zero, since + 1)",  # counted from the prefix's end
        f"{SERVING} -k 'behind_prefixes and key'",
    ),
    Mutation(
        f"{TRITON}/_prefill_attend.py",
        "gone + h * total + key, mask=key < end, other=0) > first",
        "gone + h * total + key, mask=key < end, other=0) > first + 1",  # seen by one query alone
        f"{TRITON_PREFILL} -k 'shapes and window'",
    ),
    Mutation(
        f"{TRITON}/prefill_chunk.py",
        "fixed = (piece.first + torch.cat([sinks, near])).expand(heads, -1)",
        "fixed = (piece.first - 1 + torch.cat([sinks, near])).expand(heads, -1)",
        f"{TRITON_PREFILL} -k 'shapes and norm'",
    ),
    Mutation(
        f"{TRITON}/_serving_scores.py",
        "tl.where(q > 0, tl.load(m_at), -1e30)",
        "tl.load(m_at)",
        f"{SERVING} -k 'holds and once and not behind'",
    ),
    # Attention, cache, glue and policies
    Mutation(
        "kvpop_vllm/attention/step_batch.py",
        "if count and 0 < protected[i] and start <= protected[i] < start + count + ahead:",
        "if count and 0 < protected[i] and start < protected[i] < start + count + ahead:",  # no state behind p
        "tests/engine/test_fidelity.py -k 'test_chunks and sharing'",
    ),
    Mutation(
        "kvpop_vllm/attention/step_batch.py",
        "wrong = (seen != batch.starts.unsqueeze(1)) & (batch.starts.unsqueeze(1) > 0)",
        "wrong = (seen < batch.starts.unsqueeze(1)) & (batch.starts.unsqueeze(1) > 0)",  # replays pass
        "tests/attention/test_step_batch.py -k one_bad_start",
    ),
    Mutation(
        "kvpop_vllm/attention/step_batch.py",
        "columns = torch.arange(block_table.shape[1]) + first",
        "columns = torch.arange(block_table.shape[1]) + first.clamp_max(2)",  # a third prefix block is missed
        "tests/attention/test_device_batch.py -k protected_prompts",
    ),
    Mutation(
        "kvpop_vllm/attention/shifted_scores.py",
        "shifted[chunk.first : chunk.last - 1] = gate_scores[chunk.first + 1 : chunk.last]",
        "shifted[chunk.first : chunk.last - 2] = gate_scores[chunk.first + 1 : chunk.last - 1]",
        f"{PRODUCT} -k 'dms-late'",
    ),
    Mutation(
        "kvpop_vllm/cache/accounting.py",
        "blocks += layout.blocks(own, tail.budget)",
        "blocks += layout.blocks(own, retention.budget)",  # sinks that a tail behind a prefix lacks
        "tests/cache",
    ),
    Mutation(
        "kvpop_vllm/cache/accounting.py",
        "return sorted({0, longest, *range(max(1, last - size + 1), last + 1)})",
        "return sorted({0, longest, *range(max(1, last - size + 2), last + 1)})",
        "tests/cache/test_protected.py",
    ),
    Mutation(
        "kvpop_vllm/vllm_glue/cache_spec.py",
        "prefix, own = cdiv(min(length, protected), self.block_size), length - protected",
        "prefix, own = min(length, protected) // self.block_size, length - protected",  # a page too few
        "tests/cache/test_protected.py",
    ),
    Mutation(
        "kvpop_vllm/policies/allocators.py",
        "torch.arange(layers, dtype=torch.float64) / max(1, layers - 1)",
        "torch.arange(layers, dtype=torch.float64) / layers",  # the last layer has too much
        "tests/policies/test_allocators.py",
    ),
    Mutation(
        "kvpop_vllm/policies/h2o.py",
        "AttentionMass(mean=True)",
        "AttentionMass(mean=False)",
        "tests/policies/test_identities.py -k divides",
    ),
]


def copied(target: Path) -> Path:
    """Copy the working tree without ignored files, and the compiled extension, to ``target``."""
    files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(files, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for extension in (ROOT / "kvpop_vllm").glob("_C*.so"):
        shutil.copy2(extension, target / "kvpop_vllm")
    (target / "kvpop_vllm/kernels/triton").symlink_to(target / TRITON)  # else the installed kernels are imported
    setup = target / "setup.py"  # quick to compile
    setup.write_text(setup.read_text().replace('"-O3"', '"-Og"'))
    return target


def build(tree: Path, *touched: str) -> None:
    """Build the extension, recompiling the sources ``touched``.

    Raises:
        CalledProcessError: it does not compile.
    """
    for source in touched:
        (tree / source).touch()
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = os.environ | {"KVPOP_REQUIRE_EXT": "1"}
    subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)


def source_of(file: str) -> str:
    """Return the source to recompile. Headers are those that are compiled once per instruction set."""
    return file if file.endswith(".cpp") else f"{CPP}/cpu/kernels_baseline.cpp"


def run(tree: Path, tests: str, interpreted: bool) -> subprocess.CompletedProcess:
    """Run tests in a copy of the working tree; ``interpreted`` is for those of Triton's kernels."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "passive"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # it would be taken for that of the file before
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def outcome(tree: Path, mutation: Mutation) -> str:
    """Return "killed" if the tests fail or crash, "SURVIVED" if they pass, or why they did not run."""
    done = run(tree, mutation.tests, mutation.file.startswith(TRITON))
    if done.returncode == 1 or done.returncode < 0:  # a test has failed, or the process has crashed
        return "killed"
    return f"NOT RUN (exit {done.returncode}): {done.stdout[-300:]}" if done.returncode else "SURVIVED"


def plant(tree: Path, mutation: Mutation) -> str:
    """Plant one fault, run its tests and restore the file; return :func:`outcome`'s result."""
    path, compiled = tree / mutation.file, mutation.file.startswith(CPP)
    text, when = path.read_text(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    if text.count(mutation.old) != 1:
        return f"TEXT FOUND {text.count(mutation.old)} TIMES"
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        os.utime(path, ns=when)  # of C++ only source_of is recompiled
        if compiled:
            build(tree, source_of(mutation.file))
        return outcome(tree, mutation)
    finally:
        path.write_text(text)
        os.utime(path, ns=when)


def main() -> int:
    """Plant the chosen mutations and return 1 if any was not killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="plant mutations whose file or texts contain one of these")
    words = parser.parse_args().words
    chosen = [row for row in TABLE if not words or any(word in " ".join(row) for word in words)]
    chosen.sort(key=lambda row: row.file.startswith(CPP))  # from the first of these on the extension is mutated
    failed, stale = 0, None
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = copied(Path(folder))
        for tests in dict.fromkeys(row.tests for row in chosen):
            interpreted = any(row.tests == tests and row.file.startswith(TRITON) for row in chosen)
            if run(tree, tests, interpreted).returncode:
                print(f"without a fault, these fail too: pytest {tests}")
                return 1
        for number, row in enumerate(chosen, 1):
            begin = time.monotonic()
            if row.file.startswith(CPP) and stale != source_of(row.file):
                build(tree, *(() if stale is None else (stale,)))
                stale = source_of(row.file)
            found = plant(tree, row)
            failed += found != "killed"
            change = f"{row.file}: {row.new.strip().splitlines()[0]}"
            print(f"[{number}/{len(chosen)}] {found} in {time.monotonic() - begin:.0f} s  {change}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} mutations were killed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
