"""``kvpop import``: convert the gates and scorers of other authors' published checkpoints to a scorer folder.

The gates of TRIM-KV (:mod:`kvpop_vllm.scorers.published_trimkv`) and of DMS (:mod:`kvpop_vllm.scorers.published_dms`),
and the scorer of a full checkpoint of KVpop (:mod:`kvpop_vllm.scorers.reader`), for the same base weights. Policies
also read a folder of KVzap's gates as it is (:mod:`kvpop_vllm.scorers.kvzap_folder`).

A ``.pth`` file is a pickle. It is read with ``weights_only=True``, so that it can hold only tensors and plain
containers, and no code is executed.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import read_json
from kvpop_vllm.hub import FILES, PICKLES, local_folder
from kvpop_vllm.model_shape import folder_sizes
from kvpop_vllm.scorers import ScorerConfig, parse_config
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME, check_tensors, read_scorer, write_scorer
from kvpop_vllm.scorers.conversion import convert
from kvpop_vllm.scorers.kvzap_folder import is_kvzap
from kvpop_vllm.scorers.published_checkpoint import is_published, open_checkpoint, unread_lines
from kvpop_vllm.scorers.published_dms import is_dms, read_dms
from kvpop_vllm.scorers.published_trimkv import read_trimkv
from kvpop_vllm.scorers.reader import reading_of

INDEXMEM = "indexmem.pt"
"""File of a scorer of IndexMem (arXiv:2605.25475)."""


class Imported(NamedTuple):
    """Scorer folder that ``kvpop import`` wrote.

    Attributes:
        config: config of the scorer.
        notes: lines about what was assumed, and about what was not taken over.
    """

    config: ScorerConfig
    notes: list[str]


def check_served(source: str | Path) -> None:
    """Check by the name of its file that a source is not a scorer of IndexMem. Nothing is read."""
    path = Path(source)
    if path.name == INDEXMEM or (path / INDEXMEM).is_file():
        raise ConfigError(
            f"{source} is a scorer of IndexMem, which cannot be served: each of its tokens has a score and a rate at which it falls,"
            " and attention also reads centroids of evicted tokens"
        )


def import_gates(source: str | Path, out: str | Path, *, sinks=None, window=None, topk=None, map_file=None) -> Imported:
    """Write a scorer folder from a published one.

    Args:
        source: published folder, or its name on the hub.
        out: folder to write.
        map_file: how to read the scorer of a full checkpoint of KVpop (``kvpop inspect-checkpoint``).
        sinks: s, default 0 for TRIM-KV and FastDMS, 1 for DMS, 4 for KVzap.
        window: w, default 1 for TRIM-KV, the published window for DMS, 128 for KVzap.
        topk: k, default ``M - 1`` for TRIM-KV, required for DMS, for KVzap that of B = 4,096.
    """
    # pickles are taken here alone, since import converts them
    source = local_folder(source, files=(*FILES, *PICKLES))
    check_served(source)
    if (Path(out) / CONFIG_NAME).exists():
        raise ConfigError(f"{out} holds a scorer already: choose another folder")
    options = {"sinks": sinks, "window": window, "topk": topk}
    sizes = {name: number for name, number in options.items() if number is not None}
    if is_published(source):
        return _full(source, out, map_file, sizes)
    if map_file is not None:
        raise ConfigError(f"--map is for full checkpoints of KVpop, and {source} is none: leave it out")
    if is_kvzap(source):
        return _kvzap(source, out, sizes)
    shape = folder_sizes(source)
    raw = read_json(source / "config.json", "give a published folder")
    if "retention_gate" in raw:
        config, layers, notes = read_trimkv(source, raw, shape, sinks, window, topk)
    elif is_dms(source, raw):
        config, layers, notes = read_dms(source, raw, shape, sinks, window, topk)
    else:
        raise ConfigError(
            f"{source}: config.json has neither retention_gate (TRIM-KV) nor dms_alpha_scale (DMS), nor is its model_type kvzap: give a folder of one of them"
        )
    check_tensors(config, layers, str(source))
    write_scorer(out, config, layers)
    return Imported(config, notes)


def _full(source: Path, out: str | Path, map_file: str | Path | None, sizes: dict[str, int]) -> Imported:
    """Write the scorer of a full checkpoint of KVpop, whose weights may be pickles. ``sizes`` come before its own."""
    checkpoint = open_checkpoint(source, pickles=True)
    theirs = reading_of(checkpoint, map_file)
    config, layers = convert(checkpoint, dataclasses.replace(theirs, budget=theirs.budget | sizes))
    write_scorer(out, config, layers)
    notes = [f"not taken over: the model's weights, so serve the scorer with those of {source}"]
    return Imported(config, notes + unread_lines("config.json", checkpoint.facts.unread))


def _kvzap(source: Path, out: str | Path, sizes: dict[str, int]) -> Imported:
    """Write gates of KVzap as a scorer folder. ``sizes`` come before the defaults."""
    config, layers = read_scorer(source)
    config = parse_config(config.to_json() | sizes, str(source))
    write_scorer(out, config, layers)
    return Imported(config, [])
