"""Child process that answers commands; it imports nothing of this repository, which peers do not have."""

import json
import os
import random
import sys
import time

WARM_UP = 2
"""Steps of each turn that are not counted, because the processor's caches hold another process's data."""


class Child:
    """Process whose parent sends lines ``[method, arguments]`` and gets a line of JSON for each.

    Other output goes to the log.
    """

    def __init__(self):
        self.replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def serve(self) -> None:
        """Answer commands from standard input until it ends, and end the process without its teardown."""
        for line in sys.stdin:
            command, arguments = json.loads(line)
            self.reply(getattr(self, command)(**arguments))
        os._exit(0)

    def reply(self, what) -> None:
        """Write a reply, or a line of progress."""
        print(json.dumps(what), file=self.replies)

    @staticmethod
    def random_tokens(seed: int, length: int) -> list[int]:
        """Return random token ids."""
        draw = random.Random(seed)
        return [draw.randrange(100, 40000) for _ in range(length)]

    def steps(self, requests: int, steps: int) -> dict:
        """Return milliseconds of each step in which all ``requests`` decode; the first few steps are not counted."""
        times = []
        for _ in range(WARM_UP + steps):
            begin = time.perf_counter()
            decoded = self.step()
            times.append(1e3 * (time.perf_counter() - begin))
            if decoded != requests:
                raise RuntimeError(f"{decoded} of {requests} requests decoded: a turn must hold all of them")
        return {"ms": times[WARM_UP:]}
