"""Files and folders of texts, and the rows packed from them."""

from __future__ import annotations

import json
import random

import datasets
import pyarrow
import pyarrow.parquet
import torch
from distill.byte_tokenizer import EOS, byte_tokenizer

from kvpop_vllm.distill.data import PackedTokens

datasets.disable_progress_bars()
TABLES = ("jsonl", "parquet", "saved")


def write(folder, name, kind, records):
    """Write a file or `datasets` folder of ``records`` and return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / (name if kind == "saved" else f"{name}.{kind}")
    if kind == "txt":
        (record,) = records
        path.write_text(record["text"], encoding="utf-8", newline="")
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=7)
    else:
        datasets.Dataset.from_list(records).save_to_disk(path)
    return path


def texts(count, seed=0, longest=300):
    """Return texts with several bytes per character; each begins with its number."""
    draw = random.Random(seed)
    return [f"{i} " + "".join(draw.choices("abc \né中", k=draw.randrange(longest))) for i in range(count)]


def records(texts, **fields):
    return [{"text": text, **fields} for text in texts]


def pack(paths, length=32, **options):
    return PackedTokens(paths, options.pop("tokenizer", None) or byte_tokenizer(), length, **options)


def stream(rows):
    return [token for row in rows for token in row.tolist()]


def pieces(stream):
    """Return the parts of a stream of tokens, each up to and with its EOS."""
    documents, start = [], 0
    for end, token in enumerate(stream):
        if token == EOS:
            documents.append(stream[start : end + 1])
            start = end + 1
    return documents + [stream[start:]] * (start < len(stream))


def documents(paths, **options):
    """Return all texts of a split, each in one piece; rows of two tokens omit at most the last EOS."""
    parts = pieces(stream(pack(paths, 2, piece_rows=10**6, **options).one_pass()))
    return [bytes(token for token in piece if token != EOS).decode() for piece in parts]


def equal(rows, expected):
    rows, expected = list(rows), list(expected)
    return len(rows) == len(expected) > 0 and all(map(torch.equal, rows, expected))
