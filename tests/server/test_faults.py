"""A process of a real server is killed amid requests: they end with an error, the server ends, the next one is clean."""

from __future__ import annotations

import json
import threading
import time

import httpx
import psutil
import pytest
import soak
from compaction.test_trained import write_model
from serving import Server

from kvpop_vllm.testing import random_prompt

pytestmark = pytest.mark.slow

LENGTH = 131_072
"""Tokens of a sequence: minutes of decoding, because a client may hear of tokens seconds after they are decoded."""
OPTIONS = f"--kv-policy streaming-llm --kv-budget 64 --max-model-len {LENGTH} --max-num-seqs 4"
OPTIONS = [*OPTIONS.split(), "--kv-cache-memory-bytes", str(32 << 20), "--enforce-eager"]
PATIENCE_S = 600


class Stream(threading.Thread):
    """Client of a greedy stream that lasts; it collects token ids, and what else the server says."""

    def __init__(self, server: Server, model: str, prompt: list[int]):
        super().__init__(daemon=True)
        self.url, self.tokens, self.errors, self.ended = f"{server.url}/v1/completions", [], [], False
        self.body = {"model": model, "prompt": prompt, "max_tokens": LENGTH - 200, "temperature": 0, "ignore_eos": True}
        self.body |= {"stream": True, "return_token_ids": True}

    def run(self):
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=PATIENCE_S) as reply:
                for line in reply.iter_lines():
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


def until(condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.01)


def killed_amid_streams(server: Server, model: str, title: str) -> list[Stream]:
    """Kill the process with this title while two requests are answered, check the end, and return the streams."""
    tree = psutil.Process(server.process.pid).children(recursive=True)
    (victim,) = [process for process in tree if process.is_running() and process.cmdline()[:1] == [title]]
    streams = [Stream(server, model, random_prompt(length, seed=length)) for length in (100, 150)]
    for stream in streams:
        stream.start()
    until(lambda: all(len(stream.tokens) > 20 or stream.errors for stream in streams), "both requests are answered")
    victim.kill()
    for stream in streams:
        stream.join(PATIENCE_S)
        assert not stream.is_alive() and not stream.ended, f"the client was not told, after {len(stream.tokens)} tokens"
        told = "EngineCore encountered an issue" in stream.errors[0] or "Error(" in stream.errors[0]
        assert told or (title == "VLLM::Worker" and stream.errors[0] == "abort"), stream.errors
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
    model = str(write_model(tmp_path / "model", max_position=LENGTH))
    canary = {"model": model, "prompt": random_prompt(150, seed=1), "max_tokens": 40, "temperature": 0, "logprobs": 3}
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
