"""``vllm serve`` as a child process on a free local port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

WAIT_S = 900
"""Seconds in which a server must answer /health."""


class ServerError(Exception):
    """Failure of the server to start or to keep running; the message ends with its last lines of output."""


class Server:
    """Context manager that runs ``vllm serve MODEL OPTIONS...``.

    Args:
        model: folder or Hub id.
        options: further arguments of ``vllm serve``.
        say: function that is called with progress lines.
        env: environment variables in addition to those of this process.
    """

    def __init__(self, model: str, *options: str, say=print, env: dict[str, str] | None = None):
        self.model, self.options, self.say = model, options, say
        self.env = os.environ | (env or {})

    def __enter__(self) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [str(Path(sys.executable).with_name("vllm")), "serve", self.model, *self.options]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process, signals = None, {signal.SIGTERM, signal.SIGINT}
        # no signal may arrive before self.process is set
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=self.env,
                    preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait(self) -> None:
        start, reported = time.monotonic(), 0.0
        while time.monotonic() - start < WAIT_S:
            if self.process.poll() is not None:
                raise ServerError(f"vllm serve ended with code {self.process.returncode}:\n{self.tail()}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                self.say(f"  healthy after {time.monotonic() - start:.0f} s")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
            if time.monotonic() - start - reported > 15:
                reported = time.monotonic() - start
                self.say(f"  starting, {reported:.0f} s")
        raise ServerError(f"vllm serve was not healthy after {WAIT_S} s:\n{self.tail()}")

    def __exit__(self, *_) -> None:
        if self.process is None:
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):  # stop the engine and its workers if they still run
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()

    def log(self) -> str:
        """Return everything the server has printed."""
        return Path(self._log.name).read_text(errors="replace")

    def tail(self, lines: int = 8) -> str:
        """Return the last ``lines`` lines the server has printed."""
        return "\n".join(self.log().splitlines()[-lines:])

    def metrics(self) -> str:
        """Return the text of /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            return reply.read().decode()

    def cache_info(self, name: str) -> float:
        """Return a number from the labels of ``vllm:cache_config_info``.

        Raises:
            ServerError: /metrics does not have it.
        """
        match = re.search(rf'^vllm:cache_config_info{{.*?\b{name}="([^"]+)"', self.metrics(), re.MULTILINE)
        if match is None:
            raise ServerError(f"/metrics has no {name} in vllm:cache_config_info")
        return float(match[1])

    def blocks_in_use(self) -> int:
        """Return the number of blocks that requests hold now, from vLLM's usage gauge.

        Its null block is not counted.

        Raises:
            ServerError: /metrics does not have the gauge.
        """
        usage = re.search(r"^vllm:kv_cache_usage_perc{[^}]*} (\S+)", self.metrics(), re.MULTILINE)
        if usage is None:
            raise ServerError("/metrics has no vllm:kv_cache_usage_perc")
        return round(float(usage[1]) * (self.cache_info("num_gpu_blocks") - 1))
