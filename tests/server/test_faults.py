"""A process of a real server is killed amid requests: they end with an error, the server ends, the next one is clean."""

import json
import math
import time

import httpx
import psutil
import pytest
from compaction.test_trained import write_model
from serving import Server
from stress import soak
from vllm.v1.engine.exceptions import EngineDeadError

from kvpop_vllm.testing import random_prompt

pytestmark = pytest.mark.slow

LENGTH = 131_072
"""Tokens of a sequence: minutes of decoding, because a client may hear of tokens seconds after they are decoded."""
OPTIONS = f"--kv-policy streaming-llm --kv-budget 64 --max-model-len {LENGTH} --max-num-seqs 4"
OPTIONS = [*OPTIONS.split(), "--kv-cache-memory-bytes", str(32 << 20), "--enforce-eager"]
LAYERS = 32
"""Layers of the model. A step must cost many times what an API server spends on its tokens: vLLM's API server reads
outputs without a turn for anything else while more are there, so on a busy machine a faster engine keeps other requests
out, and stops the streams too, as long as it decodes."""
PATIENCE_S = 600
DEAD_ENGINE = getattr(EngineDeadError, "CLIENT_MESSAGE", "EngineCore encountered an issue")
"""Message to a client of a dead engine. In 0.32 vLLM has no message for clients alone."""


class Stream:
    """Greedy stream that lasts, read in the caller's thread.

    A thread of its own would keep others of this process from running: on a busy machine it always finds data, and a
    thread that waits for the interpreter's lock seldom gets it from one that releases it for moments only.

    Attributes:
        tokens: token ids read so far.
        errors: the server's other messages.
        ended: whether the answer came to its end.
    """

    def __init__(self, server: Server, model: str, prompt: list[int]):
        self.url, self.tokens, self.errors, self.ended = f"{server.url}/v1/completions", [], [], False
        self.body = {"model": model, "prompt": prompt, "max_tokens": LENGTH - 200, "temperature": 0, "ignore_eos": True}
        self.body |= {"stream": True, "return_token_ids": True}
        client = httpx.Client(timeout=PATIENCE_S)
        self.reply = client.send(client.build_request("POST", self.url, json=self.body), stream=True)
        self.lines = self.reply.raise_for_status().iter_lines()

    def read(self, tokens: float = math.inf) -> None:
        """Read until there are so many tokens, or to the end."""
        try:
            while len(self.tokens) < tokens and (line := next(self.lines, None)) is not None:
                if line.startswith("data: {"):
                    self.event(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.errors.append(repr(error))

    def event(self, event: dict) -> None:
        if "error" in event:
            self.errors.append(event["error"]["message"])
            return
        (choice,) = event["choices"]
        self.tokens += choice["token_ids"]
        # what stock vLLM says if its engine sees a worker's death between two steps
        if choice["finish_reason"] == "abort":
            self.errors.append("abort")
        self.ended = self.ended or choice["finish_reason"] in ("stop", "length")


def until(condition, event: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {event}"
        time.sleep(0.01)


def killed_amid_streams(server: Server, model: str, title: str) -> list[Stream]:
    """Kill the process with this title while two requests are answered, check the end, and return the streams."""
    tree = psutil.Process(server.process.pid).children(recursive=True)
    (victim,) = [process for process in tree if process.is_running() and process.cmdline()[:1] == [title]]
    streams = [Stream(server, model, random_prompt(length, seed=length)) for length in (100, 150)]
    for stream in streams:
        stream.read(20)
        assert not stream.errors and not stream.ended, stream.errors
    victim.kill()
    for stream in streams:
        stream.read()
        assert stream.errors and not stream.ended, f"the client was not told, after {len(stream.tokens)} tokens"
        reported = DEAD_ENGINE in stream.errors[0] or "Error(" in stream.errors[0]
        assert reported or (title == "VLLM::Worker" and stream.errors[0] == "abort"), stream.errors
    with pytest.raises(httpx.HTTPError):  # the server may be there for a moment, and says 500 then
        httpx.post(streams[0].url, json=streams[0].body | {"max_tokens": 1, "stream": False}).raise_for_status()
    until(lambda: server.process.poll() is not None, "the server ends")
    until(lambda: not any(map(alive, tree)), "its other processes end")
    return streams


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_process(tmp_path):
    """The tokens sent until then are those of each request alone, and a new server gives the bits of the old one."""
    model = str(write_model(tmp_path / "model", layers=LAYERS, max_position=LENGTH))
    canary = {"model": model, "prompt": random_prompt(150, seed=1), "max_tokens": 40, "temperature": 0, "logprobs": 3}
    canary["return_tokens_as_token_ids"] = True
    with Server(model, *OPTIONS) as server:
        first = soak.ask({"url": server.url}, canary)
        streams = killed_amid_streams(server, model, "VLLM::EngineCore")
    with Server(model, *OPTIONS) as server:
        assert server.blocks_in_use() == 0
        assert soak.ask({"url": server.url}, canary) == first
        for stream in streams:
            alone = stream.body | {"max_tokens": 20, "stream": False}
            (choice,) = httpx.post(f"{server.url}/v1/completions", json=alone, timeout=PATIENCE_S).json()["choices"]
            assert choice["token_ids"] == stream.tokens[:20]
        assert server.blocks_in_use() == 0
        killed_amid_streams(server, model, "VLLM::Worker")
