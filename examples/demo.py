"""Serve a real model with a bounded KV cache, ask it a question, and count the bytes: `make demo`."""

import argparse
import json
import signal
import sys
from pathlib import Path

import openai
import torch
from needle import finish, parser_of, question
from serving import Server, ServerError

from kvpop_vllm import policies
from kvpop_vllm.cache.accounting import dense_request_bytes, pool_bytes, request_bytes
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.model_shape import ModelShape, folder_sizes
from kvpop_vllm.policies.base import Policy

MIB = 2**20


def ask(server: Server, prompt: str, tokens: int) -> tuple[str, int, int]:
    """Stream a chat completion.

    The last token of an answer never enters the cache, because no other token is predicted from it.

    Returns:
        The answer, the number of tokens that entered the cache, and the most blocks in use.
    """
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    answer, length, blocks = "", 0, 0
    for event in stream:
        blocks = max(blocks, server.blocks_in_use())
        if event.choices and event.choices[0].delta.content:
            answer += event.choices[0].delta.content
            print(event.choices[0].delta.content, end="", flush=True)
        length = event.usage.total_tokens - 1 if event.usage else length
    print()
    return answer, length, blocks


def run(args: argparse.Namespace) -> None:
    """Serve the model with the policy, ask the question, serve it without a policy, and print the report."""
    common = ["--max-model-len", str(args.max_model_len), "--kv-cache-memory-bytes", str(args.kv_memory * MIB)]
    flags = ["--kv-policy", args.policy, "--kv-budget", str(args.budget)]
    scorer = str(args.scorer) if args.policy == "kvpop" else None
    if scorer:
        flags += ["--kv-scorer", scorer]
    args.dtype = served_dtype(args.model)
    common += ["--dtype", args.dtype]
    shape = ModelShape(**folder_sizes(args.model), max_model_len=args.max_model_len)
    policy = policies.get(args.policy)(PolicySettings(args.policy, args.budget, scorer=scorer), shape)
    print(f"$ vllm serve {args.model.name} {' '.join(flags + common)}", flush=True)
    with Server(str(args.model), *flags, *common) as server:
        print("\n> a report of several thousand tokens, then: what is the special magic number for quokka?\n")
        _, length, blocks_seen = ask(server, question(args.notes), args.tokens)
        bounded = [server.cache_info(name) for name in ("num_gpu_blocks", "kv_cache_max_concurrency")]
    print("\nThe same server without a policy, for vLLM's own dense figures:", flush=True)
    with Server(str(args.model), *common, "--enforce-eager") as server:
        dense = [server.cache_info(name) for name in ("num_gpu_blocks", "kv_cache_max_concurrency", "block_size")]
    report(args, policy, length, blocks_seen, bounded, dense)


def served_dtype(model: Path) -> str:
    """Return the dtype of a model's config, or float32 where a CPU multiplies bfloat16 100 times as slowly."""
    slow = not torch.cuda.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = json.loads((model / "config.json").read_text())["dtype"]
    return "float32" if slow and dtype == "bfloat16" else dtype


def report(
    args: argparse.Namespace, policy: Policy, length: int, blocks_seen: int, bounded: list[float], dense: list[float]
) -> None:
    """Print the bytes of the request and of the pool, with the policy and dense.

    Args:
        args: arguments of the command line.
        policy: resolved policy.
        length: tokens that entered the request's cache.
        seen: most blocks that vLLM's gauge reported.
        bounded: blocks of the pool and vLLM's maximum concurrency, with the policy.
        dense: the same of stock vLLM, and the tokens per block.

    Raises:
        ServerError: the request held more blocks than its budget allows.
    """
    dtype = getattr(torch, args.dtype)
    model, budget = policy.model, policy.retention.budget
    heads, size, layers = model.num_kv_heads, model.head_dim, model.num_layers
    layout = PageLayout(heads, size, dtype, state_floats=policy.state_floats)
    shares = policy.unequal_shares(slice(0, heads))
    ours = {n: request_bytes(layout, layers, n, policy.retention, shares) for n in (length, model.max_model_len)}
    stock = {n: dense_request_bytes(layers, heads, size, dtype, n, int(dense[2])) for n in ours}
    if blocks_seen > ours[length].blocks:
        raise ServerError(
            f"the request held {blocks_seen} blocks, more than the {ours[length].blocks} its budget allows"
        )
    print(f"\n{length} tokens in the request's cache, {min(length, budget)} of them kept per KV head\n")
    print(f"{'':22} {'allocated':>12} {'keys and values':>16}")
    for name, cache in ((args.policy, ours[length]), ("dense", stock[length])):
        print(f"{'request, ' + name:22} {mib(cache.allocated)} {mib(cache.canonical):>16}  in {cache.blocks} blocks")
    for name, cache, (blocks, concurrency) in ((args.policy, ours, bounded), ("dense", stock, dense[:2])):
        pool = pool_bytes(cache[model.max_model_len], int(blocks))
        fits = f"with {int(pool.requests)} requests of {model.max_model_len} tokens; vLLM reports {concurrency:.1f}"
        print(f"{'pool, ' + name:22} {mib(pool.allocated)} {mib(pool.canonical):>16}  {fits}")
    ratio = stock[length].allocated / ours[length].allocated
    print(
        f"\nThe dense cache takes {ratio:.1f} times as many bytes (vLLM's gauge saw {blocks_seen} blocks of the request)."
    )


def mib(count: int) -> str:
    """Return a number of bytes as text in MiB."""
    return f"{count / MIB:8.1f} MiB"


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = parser_of(__doc__, tokens=48, policies=["kvpop", "streaming-llm"])
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--kv-memory", type=int, default=512, metavar="MIB")
    return parser


if __name__ == "__main__":
    # exit by an exception, so that the server is stopped too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(finish(run, arguments().parse_args(), (ServerError, ConfigError)))
