"""Data sets by the names of `datasets`, whole or as a stream; a folder of data files is one too."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import sample_digest

PREFIX = "hf:"
"""Start of a data set's name where files are taken as well."""
_NAME = re.compile(r"hf:(?P<path>[^@:]+)(@(?P<revision>[^:]+))?(:((?P<config>[^/]+)/)?(?P<split>[^/]+))?")


def needs(module: str):
    """Return a module of an extra package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"this data needs {module.split('.')[0]}: pip install 'kvpop-vllm[distill]'") from None


class HubData:
    """One split of a data set.

    Args:
        text: ``hf:NAME[@REVISION][:[CONFIG/]SPLIT]``; the split is ``train`` by default.

    Raises:
        ConfigError: the text has another form.
    """

    def __init__(self, text: str):
        if (name := _NAME.fullmatch(text)) is None:
            raise ConfigError(f"{text} is no name of a data set: give hf:NAME[@REVISION][:[CONFIG/]SPLIT]")
        self.text, self.split = text, name["split"] or "train"
        self.path, self.revision, self.config = name["path"], name["revision"], name["config"]

    @property
    def place(self) -> tuple[str, ...]:
        """Return what all spellings of a split have in common: name or folder, revision, config and split."""
        path = str(Path(self.path).resolve()) if Path(self.path).is_dir() else self.path
        return path, self.revision or "", self.config or "", self.split

    @cached_property
    def builder(self):
        """The data set's `DatasetBuilder`.

        Raises:
            ConfigError: there is no such data set, revision, config or split, or the hub cannot be reached.
        """
        datasets = needs("datasets")
        try:
            builder = datasets.load_dataset_builder(self.path, self.config, revision=self.revision)
        except (OSError, ValueError) as error:  # those of `datasets` and of its HTTP client among them
            raise self._refusal(error) from None
        splits = [str(split) for split in builder.config.data_files or builder.info.splits or ()]
        if self.split not in splits:
            raise ConfigError(f"{self.text} has the splits {', '.join(splits)}, not {self.split}: give one of them")
        return builder

    def _refusal(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.text} cannot be read ({' '.join(str(error).split())}): check the name and the connection, or give files"
        )

    def table(self):
        """Return the split as a `Dataset`, downloaded into the cache of `datasets`.

        Raises:
            ConfigError: it cannot be downloaded or read.
        """
        datasets = needs("datasets")
        try:
            self.builder.download_and_prepare()
            return self.builder.as_dataset(split=self.split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise self._refusal(error.__cause__ or error) from None

    def stream(self):
        """Return the split as an `IterableDataset`."""
        return self.builder.as_streaming_dataset(split=self.split)

    def fingerprint(self) -> list:
        """Return values that change with the data: names of files with their revision, of local ones size and sample."""
        config = self.builder.config
        files = config.data_files[self.split] if config.data_files else [self.builder.hash]
        return [config.name, self.split, *map(_file_fingerprint, files)]


def data_sets(names: Iterable[str]) -> list[HubData]:
    """Return the data sets of some names, each once however it is spelt, in an order that no spelling changes."""
    by_place = {data.place: data for data in map(HubData, names)}
    return [by_place[place] for place in sorted(by_place)]


def _file_fingerprint(name: str) -> list:
    path = Path(name)
    return [path.name, path.stat().st_size, sample_digest(path)] if path.is_file() else [name]
