"""Measures what answers about a corpus lose when a cartridge takes its place.

Usage: ``python benchmarks/cartridge_kl.py MODEL CORPUS QUESTIONS CARTRIDGE... [--threads N]``. QUESTIONS is a text file
with one question a line. Each is answered once, sampled, with the whole corpus where the cartridges stand. The KL divergence
from the full context to the model with each cartridge is averaged over the answers' tokens, teacher forced, over the whole vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kvpop_vllm.compaction.cartridge import check_base, read_cartridge
from kvpop_vllm.compaction.cartridge_training import stop_tokens
from kvpop_vllm.compaction.prompt_place import place_of
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.run import corpus_of, load
from kvpop_vllm.compaction.sampling import TransformersSampler
from kvpop_vllm.compaction.trained_cache import Packed
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
    place = place_of(tokenizer)
    tokens = place.around(corpus_of(place, options.corpus)[1])
    questions = [line for line in Path(options.questions).read_text().splitlines() if line]
    prompts = [place.asking(question) for question in questions]
    sample = TransformersSampler(model, stop_tokens(options.model, tokenizer))
    answers = [own.tokens for own in sample(tokens, prompts, options.answer, range(len(prompts)))]
    alone = place.head or tokens[:1]
    caches = {"no context": ([(k, v, None) for k, v in read_corpus(model, alone)], len(alone))}
    for folder in options.cartridges:
        found = read_cartridge(folder)
        check_base(found.config, options.model)
        if found.config.head != place.head:
            parser.error(f"{folder} does not stand in the message of a chat as the full context does: make it again")
        caches[folder] = found.layers, found.config.next_position
    full = [(k, v, None) for k, v in read_corpus(model, tokens)]
    lost = dict.fromkeys(caches, 0.0)
    for prompt, answer in zip(prompts, answers, strict=True):
        best = answer_logp(model, full, len(tokens), prompt, answer)
        for name, (layers, position) in caches.items():
            own = answer_logp(model, layers, position, prompt, answer)
            lost[name] += float((best.exp() * (best - own)).sum())
    count = sum(map(len, answers))
    print(f"{len(tokens)} tokens of context, {len(answers)} answers, {count} tokens")
    for name, value in lost.items():
        print(f"{value / count:8.4f} nats a token  {name}")


if __name__ == "__main__":
    main()
