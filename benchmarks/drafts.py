"""Texts for measuring speculative decoding, of which engines read a part and write the rest: `decode.py --speculative`.

    python benchmarks/drafts.py json --tokens 7500    # print one

In `json` an assistant gives back a JSON file with one field changed, so that drafts of n-grams are right more often than
not. `prose` is Python's manual, where few are. What a small model would write instead does not matter: engines are forced to go on
with the text, so that all of them see the same drafts and accept the same ones.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache

import record
from engines import DEMO_MODEL

PROSE = record.ROOT / "kvpop_vllm" / "calibrate" / "text.jsonl"
NAMES = "Ada Ben Clara David Emma Felix Grace Henry Iris Jonas Karla Leo Mia Noah Olga Paul".split()
CITIES = "Athens Dublin Lisbon Madrid Oslo Prague Vienna Warsaw".split()
TOKENS_OF_RECORD = 50
"""Tokens of a record in JSON, about."""


def records(count: int, seed: int) -> list[dict]:
    """Return the records of a JSON file, at random."""
    draw = random.Random(seed)
    return [
        {
            "id": number,
            "name": f"{draw.choice(NAMES)} {draw.choice(NAMES)}son",
            "city": draw.choice(CITIES),
            "price": round(draw.uniform(1, 999), 2),
            "count": draw.randrange(1000),
            "paid": draw.random() < 0.5,
        }
        for number in range(count)
    ]


def json_text(tokenizer, context: int, seed: int) -> list[int]:
    """Return the tokens of a chat in which a JSON file of 4/5 of ``context`` tokens is given back with one field changed.

    The field lies within 300 tokens after ``context``, and the answer ends later.
    """
    items = records(context * 4 // 5 // TOKENS_OF_RECORD, seed)
    begin = len(tokenizer(_chat(items, 0, "")).input_ids)
    changed = (context + 150 - begin) // TOKENS_OF_RECORD
    answer = [record_ | ({"count": 1000} if record_["id"] == changed else {}) for record_ in items]
    return tokenizer(_chat(items, changed, json.dumps(answer, indent=2))).input_ids


def _chat(items: list[dict], changed: int, answer: str) -> str:
    """Return a chat in the demo model's form."""
    question = f"Give back this file with the count of record {changed} set to 1000.\n{json.dumps(items, indent=2)}"
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


@lru_cache(maxsize=1)
def _prose(tokenizer) -> list[int]:
    """Return the tokens of all prose of the text for calibration."""
    lines = map(json.loads, PROSE.read_text(encoding="utf-8").splitlines())
    return tokenizer("\n\n".join(line["text"] for line in lines if line["group"].startswith("prose"))).input_ids


def prose_text(tokenizer, context: int, seed: int) -> list[int]:
    """Return the tokens of the prose from another place for each seed on; after its end it begins again."""
    prose = _prose(tokenizer)
    first = seed * 2311 % len(prose)
    return [*prose[first:], *prose[:first]]


TEXTS = {"json": json_text, "prose": prose_text}


def texts_of(kind: str, model: str, lengths: list[int], end: int) -> list[list[int]]:
    """Return the first ``end`` tokens of texts of a kind, of which ``lengths`` are prompts.

    Raises:
        SystemExit: a text ends before.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, model_max_length=10**9)
    texts = [TEXTS[kind](tokenizer, length, seed)[:end] for seed, length in enumerate(lengths)]
    if short := [len(text) for text in texts if len(text) < end]:
        raise SystemExit(f"a text of the kind {kind} ends after {short[0]} tokens: raise --context")
    return texts


def main() -> None:
    """Print a text, with a line between the part that is read and the one that is written."""
    from transformers import AutoTokenizer

    parser = record.parser_of(__doc__)
    parser.add_argument("kind", choices=[*TEXTS])
    parser.add_argument("--tokens", type=int, default=7500, help="tokens that are read")
    parser.add_argument("--model", default=str(DEMO_MODEL))
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model, model_max_length=10**9)
    text = TEXTS[options.kind](tokenizer, options.tokens, 0)
    print(
        tokenizer.decode(text[: options.tokens]), tokenizer.decode(text[options.tokens :]), sep="\n---- written ----\n"
    )


if __name__ == "__main__":
    main()
