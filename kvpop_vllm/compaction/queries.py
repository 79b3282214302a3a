"""Sources of reference queries: the model repeats the corpus, or answers prompts about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache

from kvpop_vllm.compaction.reference import Reference
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.chat import render
from kvpop_vllm.distill.hook import NAME

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
"""Fewest reference tokens that must fit behind a corpus and an instruction."""


def instruction(tokenizer, prompt: str) -> list[int]:
    """Return the tokens of a prompt behind a corpus, up to where the model's answer begins."""
    text = f"\n\n{prompt}\n\n"
    if getattr(tokenizer, "chat_template", None):
        message = {"role": "user", "content": prompt}
        text = "\n\n" + render(tokenizer, [message], "the prompt", add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def room_behind(tokens: int, positions: int | None, start: int) -> int:
    """Return how many reference tokens fit behind a corpus and an instruction.

    Args:
        tokens: T.
        positions: positions of the model, or None if it has no limit.
        start: tokens of the instruction.

    Raises:
        ConfigError: fewer than 64.
    """
    room = (positions or tokens + start + (1 << 30)) - tokens - start
    if room < LEAST:
        raise ConfigError(
            f"the model has {positions} positions, too few for {tokens} tokens and {start + LEAST} reference tokens behind"
            f" them: cut the corpus to {max(0, positions - start - LEAST)} tokens"
        )
    return room


def repeat_prefill(
    tokenizer, tokens: Sequence[int], chunks: Sequence[tuple[int, int]], positions: int | None
) -> Reference:
    """Return the corpus again, in pieces that each follow directly behind it.

    Every other piece is behind an instruction to repeat the corpus. The others are without one, as text that goes
    on would be. Each chunk has pieces of its own.

    Args:
        tokenizer: the model's.
        tokens: ids of the corpus.
        chunks: first and behind the last token of each chunk.
        positions: positions of the model, or None.

    Raises:
        ConfigError: as :func:`room_behind`.
    """
    start = instruction(tokenizer, REPEAT)
    piece = min(PIECE, room_behind(len(tokens), positions, len(start)))
    found = Reference([], [], [])
    for number, (a, b) in enumerate(chunks):
        for place in range(a, b, piece):
            before = start if len(found.used) % 2 else []
            found.sequences.append(before + list(tokens[place : min(b, place + piece)]))
            found.used.append(len(before))
            found.chunks.append(number)
    return found


def self_study(
    model,
    tokenizer,
    tokens: Sequence[int],
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
        model: from :func:`kvpop_vllm.distill.hook.load_model`.
        tokenizer: the model's.
        tokens: ids of the corpus.
        caches: keys and values ``[H, T, D]`` of every layer.
        positions: positions of the model, or None.
        answers: number of answers; the prompts take turns.
        length: most tokens of an answer.
        seed: seed of the sampling.
        done: called after each answer.

    Raises:
        ConfigError: as :func:`room_behind`.
    """
    cache = DynamicCache()
    for i, (k, v) in enumerate(caches):
        cache.update(k.unsqueeze(0), v.unsqueeze(0), i)
    device = caches[0][0].device
    sequences, used = [], []
    model.set_attn_implementation("sdpa")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for i in range(answers):
                start = instruction(tokenizer, PROMPTS[i % len(PROMPTS)])
                room = room_behind(len(tokens), positions, len(start))
                ids = torch.tensor([*tokens, *start], device=device).unsqueeze(0)
                found = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    past_key_values=cache,
                    use_cache=True,
                    do_sample=True,
                    max_new_tokens=min(length, room),
                    pad_token_id=tokenizer.pad_token_id or 0,
                )
                cache.crop(len(tokens))
                sequences.append(found[0, len(tokens) :].tolist())
                used.append(len(start) - 1)
                done()
    finally:
        model.set_attn_implementation(NAME)
    return Reference(sequences, used, [None] * len(sequences))
