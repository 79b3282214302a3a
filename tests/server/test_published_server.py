"""``vllm serve FOLDER --kv-policy kvpop`` on a full checkpoint of other authors, with one and with two API servers."""

import httpx
import pytest
from engine.test_published_checkpoint import check_equal
from engine.tiny_engine import PROMPTS, generate
from scorers.spellings import SPELLINGS, write_spelling, write_tokenizer
from server.test_several_servers import API_SERVERS, connected
from serving import Server

pytestmark = pytest.mark.slow

TOKENS = 24
SIZES = (
    f"--max-model-len 1024 --max-num-seqs 16 --kv-cache-memory-bytes {64 << 20} --dtype float32 --enforce-eager".split()
)
KINDS = {"one API server": ([], 1), "two API servers": (API_SERVERS, 2)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the full checkpoint and the answers of an engine on the same values in our format."""
    base, adapter, full = write_spelling(tmp_path_factory.mktemp("spelt"), SPELLINGS["xlstm_large"], vocab=258)
    write_tokenizer(full, full.parent / "trace")
    return full, generate(base, {"policy": "kvpop", "scorer": str(adapter)}, tokens=TOKENS)


@pytest.fixture(scope="module", params=KINDS)
def served(request, written):
    """Yield a server whose command names no budget, and a connection to each of its API servers."""
    full, ours = written
    options, count = KINDS[request.param]
    words = ["--kv-policy", "kvpop", "--trust-remote-code", *SIZES, *options]
    with (
        Server(str(full), *words, env={"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}) as server,
        connected(server, count) as fronts,
    ):
        yield server, fronts, full, ours


def answer(front, model: str, prompt: list[int]) -> list[tuple[int, float]]:
    """Return the greedy tokens and log-probabilities of a completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    reply = front.client.post("/v1/completions", json=body | {"logprobs": 0, "return_token_ids": True})
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))


def test_it_answers_as_an_engine_with_the_scorer_in_our_format(served):
    server, fronts, full, ours = served
    for front in fronts:
        check_equal([answer(front, str(full), prompt) for prompt in PROMPTS], ours, 1e-3)
    log = server.log()
    assert "--kv-policy kvpop: 64 tokens per KV head (4 sinks, window 16, 44 long-range)" in log
    assert "--trust-remote-code is switched off, a KVpop checkpoint needs none of its code" in log
    assert "the scorer is read as" in log


def test_no_process_of_the_server_runs_code(served):
    """Nor does its chat template, which asks for a command."""
    server, fronts, full, _ = served
    for front in fronts:
        messages = [{"role": "user", "content": "text"}]
        reply = front.client.post(
            "/v1/chat/completions", json={"model": str(full), "messages": messages, "max_tokens": 2}
        )
        assert isinstance(reply, httpx.Response) and reply.status_code >= 400
    assert not (full.parent / "trace").exists()
