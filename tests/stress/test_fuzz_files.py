"""Damaged files are read or refused in one line, and the fuzzer finds a reader that does neither."""

import json

import pytest
from stress import fuzz_files

from kvpop_vllm.config import ConfigError


@pytest.mark.slow
def test_some_damaged_files_of_each_kind(capfd):
    assert fuzz_files.main(["--files", "600", "--seed", "1"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(fuzz_files.NAMES)
    for line in lines:
        _, refused, read = (int(word) for word in line.replace(",", "").split() if word.isdigit())
        assert refused > 50 and read > 5, "damages that nobody notices, or that everybody does"


def test_what_edits_do():
    header = json.dumps({"a": {"shape": [2]}}).encode()
    tensors = len(header).to_bytes(8, "little") + header + b"data"
    assert fuzz_files.edited(b'{"a": [1, 2]}', ("json", 2, None)) == b'{"a": [1, null]}'
    assert fuzz_files.edited(tensors, ("json", 1, 7))[8:] == b'{"a": {"shape": 7}}data'
    assert fuzz_files.edited(b"abcd", ("put", 0.5, b"xy")) == b"abxycd"
    assert fuzz_files.edited(b"abcd", ("over", 0.25, b"xy")) == b"axyd"
    assert fuzz_files.edited(b"abcd", ("cut", 0.25, 0.75)) == b"ad"
    assert fuzz_files.edited(b"abcd", ("twice", 0.25, 0.75)) == b"abcbcd"


def raising(error: Exception):
    def read(folder):
        raise error

    return read


def test_readers_that_fail_are_found(tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "good" / "a.json").write_text("{}")

    def check(read):
        return fuzz_files.check(fuzz_files.Target(tmp_path / "good", read), tmp_path / "bad", "a.json", [], 1)

    def spin(folder):
        try:
            while True:
                pass
        except (OSError, ValueError):  # as readers catch, a TimeoutError among them
            raise ConfigError("refused") from None

    assert check(lambda folder: None) is False and check(raising(ConfigError("one line"))) is True
    for read, error in (
        (raising(ConfigError("two\nlines")), AssertionError),
        (raising(KeyError("a")), KeyError),
        (spin, fuzz_files.Late),
    ):
        with pytest.raises(error):
            check(read)
    assert (tmp_path / "bad" / "a.json").read_text() == "{}"
