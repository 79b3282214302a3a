"""Files and folders appear whole or not at all."""

import os

import pytest

from kvpop_vllm.compaction.conversations import read_conversations
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.metrics import Metrics, read_metrics
from kvpop_vllm.files import replacing, write_whole


@pytest.mark.parametrize("folder", [False, True])
def test_what_is_not_written_whole_leaves_what_was_there(tmp_path, folder):
    path = tmp_path / "own"

    def write(text, error=None):
        with replacing(path) as draft:
            if folder:
                draft.mkdir()
            (draft / "file" if folder else draft).write_text(text)
            if error:
                raise error

    with pytest.raises(KeyboardInterrupt):
        write("half", KeyboardInterrupt())
    assert not list(tmp_path.iterdir())
    write_whole(tmp_path / f".own.{os.getpid()}.partial", "left by a kill")
    if folder:
        path.mkdir()  # an empty folder is replaced
    else:
        write_whole(path, "before")
        with pytest.raises(KeyboardInterrupt):
            write("half", KeyboardInterrupt())
        assert path.read_text() == "before"
    write("whole")
    assert (path / "file" if folder else path).read_text() == "whole" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("line", ["no", "[1]", '{"loss": 1.0}', "\x00", "[" * 20000])
@pytest.mark.parametrize("read", [read_metrics, read_conversations, lambda path: Metrics(path.parent, 3)])
def test_damaged_lines_are_refused_in_one_line(tmp_path, read, line):
    """A file of the steps or conversations of an earlier run that holds anything else is named."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{line}\n{{"step"')
    with pytest.raises(ConfigError, match="metrics.jsonl is damaged: remove it$") as caught:
        read(path)
    assert "\n" not in str(caught.value)
