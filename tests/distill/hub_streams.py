"""Data sets by their names on a hub, as a process of its own, which prints what it read as JSON.

Usage: ``hub_streams.py FOLDER``; the folder holds ``v1`` and ``main``, two revisions of ``owner/name``. The libraries of the
hub read its address when they are imported, so the hub is there before.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from scorers.hub_server import serving

REFUSED = "hf:owner/name@v3:high", "hf:owner/nobody", "hf:owner/name@v1"
"""Names with an unknown revision, of an unknown data set, and with an unknown split."""


def main(folder):
    root = Path(folder)
    repositories = {"datasets/owner/name": {name: root / name for name in ("main", "v1")}}
    with serving(repositories) as (address, requested):
        os.environ |= {"HF_ENDPOINT": address, "HF_HOME": str(root / "home")}
        from distill.byte_tokenizer import byte_tokenizer

        from kvpop_vllm.config import ConfigError
        from kvpop_vllm.distill import data, stream

        stream.BLOCK = {"train": 16}

        def streamed(name="hf:owner/name@v1:high", **options):
            return stream.StreamedRows([name], byte_tokenizer(), 32, **options)

        def listed(rows):
            return [rows[j].tolist() for j in range(100, 220)]

        rows = streamed(select=["effort=high"])
        result = {"rows": listed(rows), "fingerprint": rows.fingerprint}
        requested.clear()
        goes_on = streamed(select=["effort=high"])
        goes_on.restore(json.loads(json.dumps(rows.state())))
        result |= {"row": goes_on[219].tolist(), "begin": rows.place.row, "requested": files_of(requested)}
        result["main"] = streamed("hf:owner/name:default/high").fingerprint
        downloaded = data.PackedTokens("hf:owner/name@v1:low", byte_tokenizer(), 32)
        local = data.PackedTokens(root / "v1/low.jsonl", byte_tokenizer(), 32)
        result["whole"], result["local"] = ([r[j].tolist() for j in range(50)] for r in (downloaded, local))
        errors = []
        for name in REFUSED:
            try:
                streamed(name)
            except ConfigError as error:
                errors.append(str(error))
        print("RESULT" + json.dumps(result | {"errors": errors}))


def files_of(requested: list[str]) -> list[str]:
    """Return the names of the requested data files, in order."""
    return [path.rsplit("/", 1)[1] for path in requested if path.endswith(".jsonl")]


if __name__ == "__main__":
    main(*sys.argv[1:])
