"""Measures what answers about a corpus lose when a cartridge takes its place.

Usage: ``python benchmarks/cartridge_kl.py MODEL CORPUS QUESTIONS CARTRIDGE... [--threads N]``. QUESTIONS is a text file
with one question a line. Each is answered once, sampled, with the whole corpus in the user's message. The KL divergence from the full
context to the model with each cartridge is averaged over the answers' tokens, teacher forced, over the whole vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kvpop_vllm.compaction.cartridge import check_base, read_cartridge
from kvpop_vllm.compaction.conversations import teacher_prompt
from kvpop_vllm.compaction.queries import instruction
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.run import corpus_of, load
from kvpop_vllm.compaction.sampling import TransformersSampler
from kvpop_vllm.compaction.trained import Packed
from kvpop_vllm.compaction.training import stop_tokens
from kvpop_vllm.distill.run import load_tokenizer


@torch.inference_mode()
def answer_logp(model, layers, position: int, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return log-probabilities ``[A, V]`` at each position of an answer behind a cache."""
    tokens, device = prompt + answer, layers[0][0].device
    hidden = model.get_decoder()(
        input_ids=torch.tensor([tokens], device=device),
        position_ids=torch.arange(position, position + len(tokens), device=device).unsqueeze(0),
        use_cache=False,
        attend=Packed(layers, [len(tokens)]),
    ).last_hidden_state[0, len(prompt) - 1 : -1]
    return model.get_output_embeddings()(hidden).float().log_softmax(-1)


def main() -> None:
    """Print a line for each cartridge, and one for no context at all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("corpus")
    parser.add_argument("questions")
    parser.add_argument("cartridges", nargs="+")
    parser.add_argument("--answer", type=int, default=128, help="most tokens of an answer (default 128)")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model, "float32"), load_tokenizer(options.model)
    tokens = corpus_of(tokenizer, options.corpus)[1]
    questions = [line for line in Path(options.questions).read_text().splitlines() if line]
    prompts = [instruction(tokenizer, question) for question in questions]
    parts = [teacher_prompt(tokenizer, question) for question in questions]
    tokens, tails = [*parts[0][0], *tokens], [tail for _, tail in parts]
    sample = TransformersSampler(model, stop_tokens(options.model, tokenizer))
    answers = [own.tokens for own in sample(tokens, tails, options.answer, range(len(prompts)))]
    caches = {"no context": ([(k[:, :1], v[:, :1], None) for k, v in read_corpus(model, tokens[:1])], 1)}
    for folder in options.cartridges:
        found = read_cartridge(folder)
        check_base(found.config, options.model)
        caches[folder] = found.layers, found.config.next_position
    full = [(k, v, None) for k, v in read_corpus(model, tokens)]
    lost = dict.fromkeys(caches, 0.0)
    for prompt, tail, answer in zip(prompts, tails, answers, strict=True):
        best = answer_logp(model, full, len(tokens), tail, answer)
        for name, (layers, position) in caches.items():
            own = answer_logp(model, layers, position, prompt, answer)
            lost[name] += float((best.exp() * (best - own)).sum())
    count = sum(map(len, answers))
    print(f"{len(tokens)} tokens of context, {len(answers)} answers, {count} tokens")
    for name, value in lost.items():
        print(f"{value / count:8.4f} nats a token  {name}")


if __name__ == "__main__":
    main()
