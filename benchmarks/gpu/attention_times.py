"""Times of a layer's decode attention: vLLM's FlashAttention over its paged cache, and a whole `decode_step` of ours.

The version of FlashAttention is the one that vLLM chooses on this GPU: 3 on Hopper. Shapes are Qwen3-8B's. Every time
is a CUDA graph's replay with a cold cache. Rows go to a CSV file as they come.
"""

import argparse
import csv
from functools import partial
from pathlib import Path

import torch

from gpu.clock import bandwidth, graph_of, milliseconds
from gpu.sections import HEADS, KV_HEADS, SIZE, Bench, take_packages_from

ROOT = Path(__file__).resolve().parents[2]
BATCHES = 1, 8, 64
CONTEXTS = 16384, 65536
BUDGETS = 1024, 4096
PAGE = 16
"""Tokens of a block of stock vLLM."""
COLUMNS = ("attention", "requests", "tokens", "measure", "value", "unit", "of_copy")


def flash_attention_version() -> int | None:
    """Return the version of FlashAttention that vLLM chooses on this GPU, or None without it."""
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    except ImportError:
        return None
    return get_flash_attn_version(head_size=SIZE)


def flash_attention(version: int, requests: int, context: int) -> tuple[float, int]:
    """Return the milliseconds of FlashAttention for one query per request, and the bytes of keys and values."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    blocks = requests * context // PAGE
    make = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    integers = partial(torch.arange, dtype=torch.int32, device="cuda")
    k, v, q = make(blocks, PAGE, KV_HEADS, SIZE), make(blocks, PAGE, KV_HEADS, SIZE), make(requests, HEADS, SIZE)
    table, starts = integers(blocks).view(requests, -1), integers(requests + 1)
    lengths = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    schedule = None
    if version == 3:
        schedule = get_scheduler_metadata(
            batch_size=requests, max_seqlen_q=1, max_seqlen_k=context, num_heads_q=HEADS, num_heads_kv=KV_HEADS,
            headdim=SIZE, cache_seqlens=lengths, qkv_dtype=q.dtype, cu_seqlens_q=starts, page_size=PAGE, causal=True,
            num_splits=0,
        )  # fmt: skip
    out = torch.empty_like(q)

    def run() -> None:
        flash_attn_varlen_func(
            q=q, k=k, v=v, out=out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=lengths, max_seqlen_k=context,
            softmax_scale=SIZE**-0.5, causal=True, block_table=table, scheduler_metadata=schedule, fa_version=version,
            num_splits=0,
        )  # fmt: skip

    return milliseconds(graph_of(run)), k.nbytes + v.nbytes


def fixed_budget(kind: str, requests: int, budget: int) -> tuple[float, int]:
    """Return the milliseconds of a layer's `decode_step` at a full budget, and the bytes of keys and values.

    They are printed as unverified if outputs are not finite.
    """
    from kernels.factories import random_rule, random_scorer

    from gpu import serving

    bench = Bench("cuda", torch.bfloat16, False, False, float("inf"), print)
    rule = serving.recency()
    if kind == "kvpop":
        draw = torch.Generator(device="cpu").manual_seed(0)
        scorer = random_scorer("mlstm", KV_HEADS, SIZE, draw, skip=True)
        rule = random_rule(scorer, KV_HEADS, serving.SINKS, serving.WINDOW, draw)
    time = serving.layer_step(bench, rule, budget, requests, 0)
    if bench.doubts:
        print(f"unverified: {bench.doubts[0]}")
    return time, requests * KV_HEADS * budget * 2 * SIZE * bench.dtype.itemsize


def main() -> None:
    """Write a row for every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    take_packages_from(ROOT)
    copy = bandwidth()

    def write(name: str, requests: int, tokens: int, *measured: str) -> None:
        row = (name, requests, tokens, *measured)
        new = not options.out.exists()
        with options.out.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, row] if new else [row])
        print(*row, flush=True)

    version = flash_attention_version()
    if version is None:
        print("FlashAttention: not measured, as vLLM has none for this GPU")
    dense = [(f"FlashAttention {version}", partial(flash_attention, version), requests, context)
             for context in CONTEXTS for requests in BATCHES if version]  # fmt: skip
    ours = [(f"{kind} B={budget}", partial(fixed_budget, kind), requests, budget)
            for budget in BUDGETS for requests in BATCHES for kind in ("recency", "kvpop")]  # fmt: skip
    write("copy", 1, 1, "bandwidth", f"{copy / 1e9:.3f}", "TB/s", "1.000")
    for name, run, requests, tokens in dense + ours:
        try:
            time, size = run(requests, tokens)
        except torch.cuda.OutOfMemoryError:
            print(f"{name}, {requests} x {tokens}: not measured, it does not fit")
        else:
            write(name, requests, tokens, "a layer", f"{1e3 * time:.2f}", "us", f"{size / time / copy:.3f}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
