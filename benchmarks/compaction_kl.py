"""Measures what a model loses when a cartridge, or a compactor's slots, takes the place of a text.

    python benchmarks/compaction_kl.py cartridge MODEL CORPUS QUESTIONS CARTRIDGE... [--threads N]
    python benchmarks/compaction_kl.py compactor MODEL COMPACTOR --data TEXT... [--documents N]

`cartridge`: QUESTIONS is a text file with one question a line. Each is answered once, sampled, with the whole corpus
where the cartridges stand. The KL divergence from the full context to the model with each cartridge, and with no
context at all, is averaged over the answers' tokens, teacher forced, over the whole vocabulary.

`compactor`: each document gives two windows, of half to all of the tokens that the compactor was trained with. The text
goes on after one, and a passage of the other is repeated. The KL divergence from the full context is compared with that
of as many tokens of the window, the first four and the last, and with that of the untrained compactor, which keeps
tokens that are evenly spaced.
"""

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from kvpop_vllm.compaction.base_model import check_base
from kvpop_vllm.compaction.cartridge import read_cartridge
from kvpop_vllm.compaction.cartridge_training import stop_tokens
from kvpop_vllm.compaction.compactor_files import read_compactor
from kvpop_vllm.compaction.compactor_training import StillOptions, example_of, still_losses
from kvpop_vllm.compaction.prompt_place import place_of
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.run import corpus_of, load
from kvpop_vllm.compaction.sampling import TransformersSampler
from kvpop_vllm.compaction.still import Compactor
from kvpop_vllm.compaction.trained_cache import Packed
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation.haystack import rows_in_turn, single_documents, units_of
from kvpop_vllm.evaluation.output import format_table
from kvpop_vllm.evaluation.statistics import LEAST, bootstrap_ratio
from kvpop_vllm.model_shape import vocabulary_of
from kvpop_vllm.progress import progress

SINKS = 4
"""First tokens that the comparison keeps with the last ones."""


def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each way to stand for a text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(required=True, metavar="cartridge|compactor")
    cartridge, compactor = kinds.add_parser("cartridge"), kinds.add_parser("compactor")
    for command in (cartridge, compactor):
        command.add_argument("model")
        command.add_argument("--threads", type=int)
    cartridge.add_argument("corpus")
    cartridge.add_argument("questions")
    cartridge.add_argument("cartridges", nargs="+")
    cartridge.add_argument("--answer", type=int, default=128, help="most tokens of an answer (default 128)")
    cartridge.set_defaults(measure=measure_cartridges)
    compactor.add_argument("compactor")
    compactor.add_argument("--data", nargs="+", required=True, help="text, JSONL, Parquet or datasets folders")
    compactor.add_argument("--documents", type=int, default=16, help="default 16; intervals need 8")
    compactor.set_defaults(measure=measure_compactor)
    options = parser.parse_args(words)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        options.measure(options)
    except ConfigError as error:
        parser.error(str(error))


@torch.inference_mode()
def answer_logp(model, layers, position: int, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return log-probabilities ``[A, V]`` at each position of an answer after a cache."""
    tokens, device = prompt + answer, next(model.parameters()).device
    layers = [[None if part is None else part.to(device) for part in layer] for layer in layers]
    hidden = model.get_decoder()(
        input_ids=torch.tensor([tokens], device=device),
        position_ids=torch.arange(position, position + len(tokens), device=device).unsqueeze(0),
        use_cache=False,
        attend=Packed(layers, [len(tokens)]),
    ).last_hidden_state[0, len(prompt) - 1 : -1]
    return model.get_output_embeddings()(hidden).float().log_softmax(-1)


def measure_cartridges(options) -> None:
    """Print a line for each cartridge, and one for no context at all."""
    model, tokenizer = load(options.model, "float32"), load_tokenizer(options.model)
    place = place_of(tokenizer)
    tokens = place.around(corpus_of(place, options.corpus)[1])
    questions = [line for line in Path(options.questions).read_text().splitlines() if line]
    prompts = [place.asking(question) for question in questions]
    sample = TransformersSampler(model, stop_tokens(options.model, tokenizer))
    answers = [answer.tokens for answer in sample(tokens, prompts, options.answer, range(len(prompts)))]
    alone = place.head or tokens[:1]
    caches = {"no context": ([(k, v, None) for k, v in read_corpus(model, alone)], len(alone))}
    for folder in options.cartridges:
        cartridge = read_cartridge(folder)
        check_base(cartridge.config, options.model)
        if cartridge.config.head != place.head:
            raise ConfigError(
                f"{folder} does not stand in the message of a chat as the full context does: make it again"
            )
        caches[folder] = cartridge.layers, cartridge.config.next_position
    full = [(k, v, None) for k, v in read_corpus(model, tokens)]
    lost = dict.fromkeys(caches, 0.0)
    for prompt, answer in zip(prompts, answers, strict=True):
        best = answer_logp(model, full, len(tokens), prompt, answer)
        for name, (layers, position) in caches.items():
            logp = answer_logp(model, layers, position, prompt, answer)
            lost[name] += float((best.exp() * (best - logp)).sum())
    count = sum(map(len, answers))
    print(f"{len(tokens)} tokens of context, {len(answers)} answers, {count} tokens")
    for name, value in lost.items():
        print(f"{value / count:8.4f} nats a token  {name}")


def truncated(slots: int):
    """Return a function in a compactor's place that keeps a window's first four tokens and its last ``slots - 4``."""

    def keep(caches):
        return [
            (*(torch.cat([part[:, :SINKS], part[:, SINKS - slots :]], 1) for part in layer), None) for layer in caches
        ]

    return keep


def untrained(compactor: Compactor, config) -> Compactor:
    """Return the compactor that the training of another one began with."""
    start = config.build()
    for initial, trained in zip(start.layers, compactor.layers, strict=True):
        initial.scale.copy_(trained.scale)
    return start


@torch.inference_mode()
def measure_compactor(options) -> None:
    """Print a line for each way to make the slots."""
    config, compactor, _ = read_compactor(options.compactor, options.model)
    training, tokenizer = StillOptions(**config.provenance["arguments"]), load_tokenizer(options.model)
    settings = {"split": "all", "seed": 0, "vocab_size": vocabulary_of(options.model)}
    length = training.window + training.tokens_after
    rows = list(islice(rows_in_turn(single_documents, options.data, tokenizer, length, **settings), options.documents))
    if len(set(units_of(rows))) < LEAST:
        raise ConfigError(f"{len(rows)} windows are too few for intervals: raise --documents, or give {LEAST} texts")
    model = load(options.model, "float32")
    device = next(model.parameters()).device
    ways = {
        "truncation": truncated(config.slots),
        "untrained": untrained(compactor, config).to(device),
        "trained": compactor.to(device),
    }
    losses = {name: torch.zeros(len(rows), 2) for name in ways}
    with progress(len(rows), "windows") as tick:
        for number, row in enumerate(rows):
            for repeated in (0, 1):
                tokens, size = example_of(torch.tensor(row.tokens), 2 * number + repeated, training)
                for name, way in ways.items():
                    losses[name][number, repeated] = still_losses(model, way, tokens, size)[0]
            tick(1)
    table = []
    titles, baseline = ("text goes on", "a passage again"), losses["truncation"]
    for name, by_title in losses.items():
        row = {"slots made by": name}
        for title, kl, baseline_kl in zip(titles, by_title.T, baseline.T, strict=True):
            ratio = bootstrap_ratio(kl.tolist(), baseline_kl.tolist(), units=units_of(rows))
            row |= {title: f"{kl.mean():.3f}", f"{title}, ratio": "{:.2f} ({:.2f} to {:.2f})".format(*ratio)}
        table.append(row)
    print(f"{len(rows)} windows of at most {training.window} tokens, {config.slots} slots; nats a token")
    print(format_table(table, tuple(table[0])))


if __name__ == "__main__":
    main()
