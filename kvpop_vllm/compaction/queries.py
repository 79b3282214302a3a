"""Sources of reference queries: the model repeats the corpus, or answers prompts about it.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache

from kvpop_vllm.compaction.prompt_place import Place
from kvpop_vllm.compaction.reference import Reference
from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_hook import CACHE_NAME, NAME

REPEAT = "Repeat the text above word for word."
PROMPTS = (
    "Summarise the text above in detail.",
    "Write five questions that only a reader of the text above can answer, and answer each of them.",
    "For which tasks could someone need the text above? Give examples, and solve them.",
    "Structure the information in the text above as JSON, with all names, numbers and dates.",
    "List the most important facts in the text above, one a line.",
)
"""Prompts of self-study, asked in turn."""
PIECE = 512
"""Most tokens of the corpus that are repeated in one sequence."""
LEAST = 64
"""Fewest reference tokens that must fit after a corpus and an instruction."""


def room_after(place: Place, tokens: int, positions: int | None, prompt: str) -> int:
    """Return how many reference tokens fit after a corpus and an instruction.

    Args:
        place: where the corpus stands.
        tokens: tokens of the corpus.
        positions: positions of the model, or None if it has no limit.
        prompt: the instruction.
    """
    start = len(place.around(place.asking(prompt)))
    # without a limit there is room for any number
    room = (positions or tokens + start + (1 << 30)) - tokens - start
    if room < LEAST:
        raise ConfigError(
            f"the model has {positions} positions, too few for {tokens} tokens and {start + LEAST} reference tokens after"
            f" them: cut the corpus to {max(0, positions - start - LEAST)} tokens"
        )
    return room


def repeat_prefill(
    place: Place, corpus: Sequence[int], chunks: Sequence[tuple[int, int]], positions: int | None
) -> Reference:
    """Return the corpus again, in pieces that each follow directly after it.

    Every other piece is after an instruction to repeat the corpus. The others are without one, as text that goes
    on would be. Each chunk has pieces of its own.

    Args:
        place: where the corpus stands.
        corpus: its ids.
        chunks: first token and the one after the last of each chunk, among the tokens of ``place.around(corpus)``.
        positions: positions of the model, or None.
    """
    start, tokens = place.asking(REPEAT), place.around(corpus)
    first, last = len(place.head), len(tokens) - len(place.end)
    piece = min(PIECE, room_after(place, len(corpus), positions, REPEAT))
    reference = Reference([], [], [])
    for number, (a, b) in enumerate(chunks):
        for piece_start in range(max(a, first), min(b, last), piece):
            before = start if len(reference.used) % 2 else []
            reference.sequences.append(before + tokens[piece_start : min(b, last, piece_start + piece)])
            reference.used.append(len(before))
            reference.chunks.append(number)
    return reference


def self_study(
    model,
    place: Place,
    corpus: Sequence[int],
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    positions: int | None,
    *,
    answers: int = 10,
    length: int = 256,
    seed: int = 0,
    done: Callable[[], object] = lambda: None,
) -> Reference:
    """Return sampled answers of the model to prompts about the corpus, which it has read.

    Args:
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        place: where the corpus stands.
        corpus: its ids.
        caches: keys and values ``[H, T, D]`` of every layer, of the T tokens of ``place.around(corpus)``.
        positions: positions of the model, or None.
        answers: number of answers. The prompts take turns.
        length: most tokens of an answer.
        seed: seed of the sampling.
        done: called after each answer.
    """
    cache, tokens = DynamicCache(), place.around(corpus)
    for i, (k, v) in enumerate(caches):
        cache.update(k.unsqueeze(0), v.unsqueeze(0), i)
    device = caches[0][0].device
    sequences, used = [], []
    # our attention function needs an argument that generate() does not pass
    model.set_attn_implementation("sdpa")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for i in range(answers):
                start = place.asking(PROMPTS[i % len(PROMPTS)])
                room = room_after(place, len(corpus), positions, PROMPTS[i % len(PROMPTS)])
                ids = torch.tensor([*tokens, *start], device=device).unsqueeze(0)
                generated = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    **{CACHE_NAME: cache},
                    use_cache=True,
                    do_sample=True,
                    max_new_tokens=min(length, room),
                    pad_token_id=place.tokenizer.pad_token_id or 0,
                )
                cache.crop(len(tokens) - cache.get_seq_length())  # the number to remove, negative
                sequences.append(generated[0, len(tokens) :].tolist())
                # the last token of the prompt predicts the answer's first
                used.append(len(start) - 1)
                done()
    finally:
        model.set_attn_implementation(NAME)
    return Reference(sequences, used, [None] * len(sequences))
