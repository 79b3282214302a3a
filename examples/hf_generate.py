"""Fixed-size KV cache in transformers: a real model answers from a text longer than its cache, on a CPU."""

import argparse
import sys

import torch
from needle import finish, parser_of, question
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache

MIB = 2**20


def run(args: argparse.Namespace) -> str:
    """Print the answer and the size of the cache; return the answer."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    scorer = args.scorer if args.policy == "kvpop" else None
    cache = KVpopCache(model, args.policy, scorer=scorer, budget=args.budget)
    chat = [{"role": "user", "content": question(args.notes)}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    print(f"> {length} tokens of notes, then: what is the special magic number for quokka?\n", flush=True)
    output = model.generate(**inputs, cache=cache, max_new_tokens=args.tokens, do_sample=False)
    answer = tokenizer.decode(output[0, length:], skip_special_tokens=True)
    counts = cache.held().float().sum(-1)
    print(f"{answer}\n\n{cache}: of {cache.lengths[0]} tokens, {counts.mean():.0f} are held per head")
    ours, dense = cache.allocated_bytes() / MIB, cache.dense_bytes() / MIB
    print(f"{ours:.1f} MiB, however long it gets; dense {dense:.1f} MiB by now, {dense / ours:.1f} times as much")
    return answer


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return parser_of(__doc__, tokens=24)


if __name__ == "__main__":
    sys.exit(finish(run, arguments().parse_args(), (ConfigError,)))
