"""The table of planted faults fits the code."""

from collections import Counter

from mutations import ROOT, mutations

TABLE = mutations()


def test_every_text_occurs_once():
    counts = {f"{row.file}: {row.old}": (ROOT / row.file).read_text(encoding="utf-8").count(row.old) for row in TABLE}
    assert len(TABLE) >= 30 and {text for text, often in counts.items() if often != 1} == set()


def test_every_room_has_faults():
    rooms = Counter(row.file.split("/")[0] if "/kernels/" not in row.file else "kernels" for row in TABLE)
    assert {"kernels", "csrc", "triton_kernels", "kvpop_vllm"} <= rooms.keys()
