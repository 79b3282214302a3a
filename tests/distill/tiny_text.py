"""A byte-level tokenizer and made-up text for tests that run the commands."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 257
NAMES = ("Ada", "Ben", "Cleo", "Dov", "Eve", "Finn")


def write_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer with 256 tokens, one per byte, and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def write_text(path: Path, documents: int = 60) -> Path:
    """Write JSON lines of documents that repeat the names they begin with."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(documents):
            names = draw.sample(NAMES, 2)
            text = " ".join(
                f"{draw.choice(names)} met {draw.choice(names)} at {draw.randrange(24)}." for _ in range(12)
            )
            file.write(json.dumps({"text": text}) + "\n")
    return path
