"""Serve a real model with a bounded KV cache, ask it something, and count the bytes: `make demo`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import openai
import torch
from serving import Server, ServerError

from kvpop_vllm.cache.accounting import dense_request_bytes, request_bytes
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.scorers.init import init_scorer, model_shape

MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"
MIB = 2**20


def question(notes: int) -> str:
    """A long report, much longer than the budget, with what is asked for near its end."""
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    lines = [f"Note {i}: {filler}" for i in range(notes)]
    lines.insert(-3, "One of the special magic numbers for quokka is: 4719.")
    body = "\n".join(lines)
    return (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        f"number afterwards.\n{body}\nWhat is the special magic number for quokka mentioned in the provided text?"
    )


def ask(server: Server, prompt: str, tokens: int) -> tuple[str, int, int]:
    """Streams a chat completion; the answer, the request's tokens, and the most blocks it was seen to hold."""
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
        length = event.usage.total_tokens if event.usage else length
    print()
    return answer, length, blocks


def run(args: argparse.Namespace) -> None:
    shape = model_shape(args.model)
    common = ["--max-model-len", str(args.max_model_len), "--kv-cache-memory-bytes", str(args.kv_memory * MIB)]
    with tempfile.TemporaryDirectory() as scratch:
        policy = ["--kv-policy", args.policy, "--kv-budget", str(args.budget)]
        state = 0
        if args.policy == "kvpop":
            init_scorer(args.model, scratch)
            policy += ["--kv-scorer", scratch]
            state = shape["head_dim"] * (shape["head_dim"] + 1) + 1
        print(f"$ vllm serve {args.model.name} {' '.join(policy + common)}", flush=True)
        with Server(str(args.model), *policy, *common) as server:
            print("\n> a report of several thousand tokens, then: what is the special magic number for quokka?\n")
            _, length, seen = ask(server, question(args.notes), args.tokens)
            bounded = server.cache_info("kv_cache_max_concurrency")
    print("\nThe same server without a policy, for vLLM's own dense figure:", flush=True)
    with Server(str(args.model), *common, "--enforce-eager") as server:
        dense_concurrency = server.cache_info("kv_cache_max_concurrency")
    report(args, shape, state, length, seen, bounded, dense_concurrency)


def report(args, shape, state, length, seen, bounded, dense_concurrency) -> None:
    """Prints what the request held, what it would have held, and the concurrency vLLM reports for both."""
    dtype = getattr(torch, json.loads((args.model / "config.json").read_text())["dtype"])
    heads, size, layers = shape["num_kv_heads"], shape["head_dim"], shape["num_layers"]
    layout = PageLayout(heads, size, dtype, state_floats=state)
    held = request_bytes(layout, layers, length, args.budget)
    dense = dense_request_bytes(layers, heads, size, dtype, length)
    if seen > held.blocks:
        raise ServerError(f"the request held {seen} blocks, more than the {held.blocks} its budget allows")
    print(f"""
tokens of the request        {length:8d}
tokens kept per KV head      {min(length, args.budget):8d}
KV bytes held                {held.allocated / MIB:8.1f} MiB  in {held.blocks} blocks (vLLM's gauge saw {seen}); {held.canonical / MIB:.1f} MiB of it keys and values
KV bytes, dense cache        {dense.allocated / MIB:8.1f} MiB  {dense.allocated / held.allocated:.1f} times as many
concurrent requests of {args.max_model_len:5d} tokens in {args.kv_memory} MiB, as vLLM reports it
  --kv-policy {args.policy:15s} {bounded:7.1f}
  dense                       {dense_concurrency:7.1f}""")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--policy", default="streaming-llm", choices=["streaming-llm", "kvpop"])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--notes", type=int, default=150, help="lines of the report, about 30 tokens each")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--kv-memory", type=int, default=512, metavar="MIB")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        print(f"no model in {args.model}: run `make model`, or give --model", file=sys.stderr)
        return 2
    try:
        run(args)
    except ServerError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
