"""`kvpop eval --task corpus` from its options to its table. See :mod:`kvpop_vllm.evaluation.corpus`.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import functools
from contextlib import nullcontext

import torch

from kvpop_vllm.cache.pages import BLOCK_SLOTS
from kvpop_vllm.compaction.base_model import check_attention
from kvpop_vllm.compaction.compactor_files import read_compactor
from kvpop_vllm.compaction.conversations import ROOM
from kvpop_vllm.compaction.prompt_place import place_of
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation import corpus
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.haystack import single_documents
from kvpop_vllm.evaluation.options import budgets
from kvpop_vllm.evaluation.output import format_table, records_file
from kvpop_vllm.evaluation.tasks import collected, note_few, rows_of
from kvpop_vllm.model_shape import positions_of, read_model_config


def evaluate_corpus(options) -> list[dict]:
    """Run ``--task corpus``, print its table, and write records.

    Returns:
        The table.
    """
    methods = options.methods or list(corpus.DEFAULT_METHODS)
    corpus.check_methods(methods)
    against = options.against or methods[0]
    if against not in methods:
        raise ConfigError(f"--against {against} is not compared: choose from {', '.join(methods)}, or add it")
    if len(options.length) > 1:
        raise ConfigError("--task corpus has documents of one length: give one --length")
    (length,) = options.length
    # whole blocks, as cartridges have them
    slots = sorted({-(-count // BLOCK_SLOTS) * BLOCK_SLOTS for count, _ in budgets(options, length)})
    if slots[-1] >= length:
        raise ConfigError(f"{slots[-1]} slots keep all of {length} tokens: lower --budget or raise --length")
    if ("still" in methods) != (options.compactor is not None):
        raise ConfigError("--methods still and --compactor DIR go together: give both, or none")
    compactor = None
    if options.compactor is not None:
        compactor = read_compactor(options.compactor, options.model)
        if slots != [compactor.config.slots]:
            raise ConfigError(
                f"the compactor {options.compactor} has {compactor.config.slots} slots: set --budget to them"
            )
    config = read_model_config(options.model)
    check_attention(config)
    positions = positions_of(config)
    if positions is not None and length + ROOM > positions:
        raise ConfigError(
            f"the model has {positions} positions, {ROOM} for questions: lower --length to {max(0, positions - ROOM)}"
        )
    tokenizer = load_tokenizer(options.model)
    place = place_of(tokenizer)
    if slots[0] <= len(place.head):
        raise ConfigError(f"a chat has {len(place.head)} tokens before a document: raise --budget above them")
    rows, units, about = rows_of(options, single_documents)
    material = [(row.tokens.tolist(), unit) for row, unit in zip(rows, units, strict=True)]
    backend = TransformersBackend(options.model, getattr(torch, options.dtype), length + ROOM)
    settings = options.questions or 4, options.seed, options.steps or 64, compactor and compactor.module
    work = corpus.Corpus(backend, options.model, tokenizer, *settings), material, methods, slots
    # the full context and none, then each method with each number of slots
    total = len(material) * (2 + len(slots) * len(methods))
    with records_file(options.out) if options.out else nullcontext() as file:
        records = collected(file, options, about, total, functools.partial(corpus.records_of, *work))
    table = corpus.summarise(records, against)
    print(format_table(table, corpus.COLUMNS), flush=True)
    note_few(units)
    return table
