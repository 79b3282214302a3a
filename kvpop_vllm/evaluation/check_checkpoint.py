"""``kvpop check-checkpoint``: whether a reading of a checkpoint's scorer keeps what the text needs.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.run import default_device, load_tokenizer
from kvpop_vllm.distill.sources import documents_of, find_sources
from kvpop_vllm.distill.tokens import DocumentEncoder
from kvpop_vllm.evaluation.statistics import LEAST, bootstrap_ratio
from kvpop_vllm.hf import KVpopCache, load_checkpoint
from kvpop_vllm.hub import MODEL, local_folder
from kvpop_vllm.model_hook import CACHE_NAME
from kvpop_vllm.model_shape import positions_of, read_model_config, vocabulary_of
from kvpop_vllm.progress import progress
from kvpop_vllm.scorers.checkpoint import write_scorer
from kvpop_vllm.scorers.conversion import convert
from kvpop_vllm.scorers.published_checkpoint import open_checkpoint
from kvpop_vllm.scorers.reader import reading_of

PIECE = 512
"""Tokens of a pass."""
SHORTEST = 2048
"""Tokens of a row, unless twice the budget are more."""


def check_checkpoint(options: argparse.Namespace) -> None:
    """Run ``kvpop check-checkpoint``: print a table of nats per token, with differences to the first reading."""
    folder = local_folder(options.directory, files=MODEL)
    with TemporaryDirectory() as scratch:
        # scorers and rows first, because loading the model takes longest
        scorers, budget, sinks = _scorers(folder, options, Path(scratch))
        positions = positions_of(read_model_config(folder))
        length = options.length or min(max(SHORTEST, 2 * budget), positions or sys.maxsize)
        rows = list(islice(_rows(folder, options.data, length, budget), options.rows))
        if len(rows) < LEAST:
            raise ConfigError(
                f"{options.data} makes {len(rows)} rows of {budget + 2} to {length} tokens, and an interval needs {LEAST}: give"
                " more text, raise --length, or lower --budget"
            )
        dtype = {} if options.dtype is None else {"dtype": getattr(torch, options.dtype)}
        model = load_checkpoint(folder, **dtype).to(default_device())
        caches = {"dense": None} | {name: {"policy": "kvpop", "scorer": path} for name, path in scorers.items()}
        caches["window"] = {"policy": "streaming-llm", "sinks": sinks}
        nats: dict[str, list[float]] = {name: [] for name in caches}
        with progress(len(caches) * len(rows), "check-checkpoint") as tick:
            for name, cache in caches.items():
                for row in rows:
                    nats[name].append(_nats(model.eval(), cache, row, budget))
                    tick(1)
    print(f"{len(rows)} rows, B = {budget}, tokens after the first {budget} of each row")
    for line in table(nats, [len(row) - budget for row in rows], options.seed):
        print(line)


def _scorers(folder: Path, options: argparse.Namespace, scratch: Path) -> tuple[dict[str, Path], int, int]:
    """Write the scorer under each map, and a shuffled one. Return their folders by name, the first one's B and its sinks."""
    checkpoint, folders = open_checkpoint(folder), {}
    for number, map_file in enumerate(options.map or [None]):
        name = "reading" if map_file is None else f"map {map_file}"
        config, layers = convert(checkpoint, reading_of(checkpoint, map_file))
        write_scorer(scratch / f"{number}", config, layers)
        folders[name] = scratch / f"{number}"
        # budget, sinks and the shuffled scorer are those of the first reading
        if not number:
            budget, sinks = options.budget or config.sinks + config.window + config.topk, config.sinks
            draw = torch.Generator().manual_seed(options.seed)
            write_scorer(scratch / "shuffled", config, [_shuffled(t, draw) for t in layers])
    return folders | {"shuffled scorer": scratch / "shuffled"}, budget, sinks


def _shuffled(tensors: dict[str, torch.Tensor], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a layer's tensors with the weights of each in a random order."""
    return {
        name: t if t.dim() < 2 else t.flatten()[torch.randperm(t.numel(), generator=draw)].view(t.shape)
        for name, t in tensors.items()
    }


def _rows(folder: Path, text: str, length: int, budget: int) -> Iterator[torch.Tensor]:
    """Yield rows of at most ``length`` tokens, from which something is evicted."""
    encoder = DocumentEncoder(load_tokenizer(folder), vocabulary_of(folder))
    for _, ids in encoder.encode(documents_of(find_sources([text]))):
        # a row that fits the budget loses nothing
        yield from (row for row in torch.as_tensor(ids, dtype=torch.long).split(length) if len(row) > budget + 1)


@torch.inference_mode()
def _nats(model: torch.nn.Module, settings: dict | None, row: torch.Tensor, budget: int) -> float:
    """Return the summed negative log-likelihood of a row's tokens after the first ``budget``."""
    from transformers import DynamicCache

    cache = DynamicCache() if settings is None else KVpopCache(model, budget=budget, **settings)
    total, row = 0.0, row.to(model.device)
    for first in range(0, len(row) - 1, PIECE):
        inputs = row[first : first + PIECE]
        logits = model(inputs.unsqueeze(0), **{CACHE_NAME: cache}).logits[0].float()
        targets = row[first + 1 : first + 1 + len(inputs)]
        # the last token of a row has no target
        nats = torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none")
        # the target of column i stands at first + i + 1, and those from position B on count
        total += float(nats[max(0, budget - 1 - first) :].double().sum())
    return total


def table(nats: dict[str, list[float]], counts: list[int], seed: int = 0) -> list[str]:
    """Return the lines of the table, and one that says whether the first reading is better than chance.

    Args:
        nats: summed nats of each row, by name: dense first, then the readings, a shuffled scorer, a window.
        counts: tokens of each row.
        seed: seed of the draws.
    """
    first = list(nats)[1]
    lines, clear = [f"{'cache':32} nats per token, difference to {first} with its 95% interval"], []
    for name, values in nats.items():
        line = f"{name[-32:]:32} {sum(values) / sum(counts):.4f}"
        if name != first:
            pairs = [value - ours for value, ours in zip(values, nats[first], strict=True)]
            interval = bootstrap_ratio(pairs, counts, seed=seed)
            line += f"  {interval.value:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"
            if name in ("shuffled scorer", "window"):
                clear += [name] if interval.low > 0 else []
        lines.append(line)
    if len(clear) == 2:
        return [*lines, f"{first} is better than a shuffled scorer and than a window of the same size"]
    missing = " and ".join(name for name in ("shuffled scorer", "window") if name not in clear)
    return [*lines, f"{first} is not clearly better than {missing}: the reading may be wrong, or the text too short"]
