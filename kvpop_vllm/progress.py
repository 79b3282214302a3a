"""Progress of long work on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

SECONDS = 60
"""Seconds between lines of progress in a log."""


@contextmanager
def progress(total: float, label: str) -> Iterator[Callable[[float], object]]:
    """Show on stderr how much is done: a bar on a terminal, else a line at most every minute.

    Args:
        total: amount of work in any unit.
        label: name of the work.

    Yields:
        A function to call with the amount that was done since.
    """
    shown = "{desc}: {percentage:3.0f}%, {elapsed} so far, {remaining} left"
    # given, since tqdm would raise it by itself, and a line may come with any update
    options = {"miniters": 0, "mininterval": SECONDS, "file": _Lines(), "bar_format": shown}
    if sys.stderr.isatty():
        options = {"bar_format": shown.replace("%,", "%|{bar}|")}
    with tqdm(total=total, desc=label, **options) as bar:
        # beyond its total, even by a rounding, tqdm shows neither a share nor a time
        yield lambda amount: bar.update(min(amount, total - bar.n))
        # work may have been less than expected
        bar.update(total - bar.n)


class _Lines:
    """Output of tqdm as lines on stderr."""

    def write(self, text: str) -> None:
        # tqdm begins each of its lines with a carriage return
        if text := text.strip("\r\n "):
            print(text, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()
