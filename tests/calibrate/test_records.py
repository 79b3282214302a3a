"""Measurements survive interruptions, and are not taken for those of other settings."""

import pytest

from kvpop_vllm.calibrate.records import NAME, Records
from kvpop_vllm.config import ConfigError

SETTINGS = {"length": 128, "data": [["text", 3]]}


def test_what_was_measured_is_not_measured_again(tmp_path):
    first = Records(tmp_path / "new", SETTINGS)
    first.put(["layer", 0], [0.1, 0.2])
    again = Records(tmp_path / "new", SETTINGS)
    assert again[["layer", 0]] == first[["layer", 0]] == [0.1, 0.2] and ["layer", 1] not in again


@pytest.mark.parametrize("cut", [1, 8, 20])
def test_a_line_that_was_cut_off_is_measured_again(tmp_path, cut):
    records = Records(tmp_path, SETTINGS)
    records.put(["a"], 1)
    records.put(["b"], 2)
    path = tmp_path / NAME
    path.write_text(path.read_text()[:-cut])
    again = Records(tmp_path, SETTINGS)
    assert again[["a"]] == 1 and ["b"] not in again
    again.put(["b"], 3)
    assert Records(tmp_path, SETTINGS)[["b"]] == 3


def test_a_first_line_that_was_cut_off_is_written_again(tmp_path):
    Records(tmp_path, SETTINGS)
    (tmp_path / NAME).write_text('{"sett')
    Records(tmp_path, SETTINGS).put(["a"], 1)
    assert ["a"] in Records(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"settings": {"length": 64, "data": [["text", 3]]}}\n', r"other settings \(length\): choose another --out"),
        ("{}\n", r"other settings \(length, data\)"),
        ("[]\n", "is damaged: remove it"),
        ("no\n", "is damaged: remove it"),
        ('{"settings": {"length": 128, "data": [["text", 3]]}}\n{"kee": 1}\n', "is damaged: remove it"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / NAME).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Records(tmp_path, SETTINGS)
