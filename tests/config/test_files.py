"""Files and folders appear whole or not at all."""

from __future__ import annotations

import os

import pytest

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
