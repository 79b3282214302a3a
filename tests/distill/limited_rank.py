"""The command `kvpop`, whose second process may write only files of a few bytes.

Usage: ``limited_rank.py BYTES WORD...``.
"""

from __future__ import annotations

import os
import resource
import sys

from kvpop_vllm.cli import main

if __name__ == "__main__":
    limit = int(sys.argv[1])
    if os.environ["RANK"] == "1" and limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.exit(main(sys.argv[2:]))
