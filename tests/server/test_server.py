"""The real server on the real model, called by the openai client.

kvpop is compiled, as users run it, and streaming-llm is eager.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import demo
import httpx
import jsonschema
import openai
import pytest
from serving import Server
from threads import DTYPE
from transformers import AutoTokenizer

from kvpop_vllm import _C, policies
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.config import PolicySettings
from kvpop_vllm.model_shape import ModelShape, folder_sizes
from kvpop_vllm.scorers.untrained import init_scorer

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
BUDGET, MEMORY = 1024, 512 << 20
VECTORS = {"bfloat16": 256, "float32": 512}[DTYPE]
"""Bytes of a token's key and value in a head."""
VLLM = str(Path(sys.executable).with_name("vllm"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("scorer"))
    init_scorer(MODEL, folder)
    return folder


@pytest.fixture(scope="module", params=["streaming-llm", pytest.param("kvpop", marks=pytest.mark.slow)])
def served(request, scorer):
    """Yield a running server, its client, and the most blocks that one request may hold."""
    import torch

    settings = PolicySettings(request.param, BUDGET, scorer=scorer if request.param == "kvpop" else None)
    policy = policies.get(request.param)(settings, ModelShape(**folder_sizes(MODEL), max_model_len=8192))
    max_blocks = PageLayout(3, 64, getattr(torch, DTYPE), state_floats=policy.state_floats).blocks(8192, BUDGET)
    options = ["--kv-budget", str(BUDGET), "--max-model-len", "8192", "--kv-cache-memory-bytes", str(MEMORY)]
    options += ["--dtype", DTYPE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options += ["--enforce-eager"] if request.param == "streaming-llm" else ["--kv-scorer", scorer]
    with Server(str(MODEL), "--kv-policy", request.param, *options) as server:
        yield server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none"), max_blocks


def name(client) -> str:
    return client.models.list().data[0].id


def ask(client, **options):
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 3
    prompt = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        f"number afterwards.\n{filler}One of the special magic numbers for quokka is: 4719. {filler}\n"
        "What is the special magic number for quokka mentioned in the provided text?"
    )
    messages = [{"role": "user", "content": prompt}]
    options = {"model": name(client), "messages": messages, "temperature": 0, "max_tokens": 32} | options
    return client.chat.completions.create(**options)


def test_it_runs_with_the_fast_kernels_and_compiled_unless_told(served):
    server, _, _ = served
    eager = "--enforce-eager" in server.options
    assert ("Warming up model for the compilation" in server.log()) is not eager
    assert f"decoding with the cpp kernels ({_C.isa_levels()[-1]})" in server.log()


def test_chat_and_streaming_agree(served):
    _, client, _ = served
    chat = ask(client).choices[0].message.content
    assert "4719" in chat
    deltas = [event.choices[0].delta.content or "" for event in ask(client, stream=True) if event.choices]
    assert "".join(deltas) == chat and len(deltas) > 2


@pytest.mark.slow
def test_a_long_prompt_holds_a_bounded_number_of_blocks(served):
    server, client, max_blocks = served
    prompt = [(7 * i) % 40_000 + 100 for i in range(7000)]
    stream = client.completions.create(
        model=name(client),
        prompt=prompt,
        max_tokens=200,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    blocks_held, usage = [], None
    for event in stream:
        blocks_held.append(server.blocks_in_use())
        usage = event.usage or usage
    assert usage.prompt_tokens == 7000 and usage.completion_tokens == 200
    assert max(blocks_held) == max_blocks
    assert server.blocks_in_use() == 0


def test_a_request_has_a_budget_of_its_own(served):
    """A request holds the blocks of its own budget, and wrong options are a 400 with one line.

    This holds for streamed answers too.
    """
    server, client, max_blocks = served
    prompt = [(11 * i) % 40_000 + 100 for i in range(1500)]
    request = {"model": name(client), "prompt": prompt, "max_tokens": 80, "temperature": 0, "stream": True}
    blocks_held = []
    for _ in client.completions.create(
        **request, extra_body={"ignore_eos": True, "vllm_xargs": {"kv_budget": 512, "kv_protect_prompt": 0}}
    ):
        blocks_held.append(server.blocks_in_use())
    assert max(blocks_held) == max_blocks - (BUDGET - 512) // 64
    line = f"kv_budget {BUDGET + 1} is more than this server allows: lower it to at most {BUDGET}"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            wrong = {"vllm_xargs": {"kv_budget": BUDGET + 1}}
            list(client.completions.create(**request | {"stream": stream}, extra_body=wrong))
        assert error.value.status_code == 400 and line in error.value.message and "\n" not in error.value.message
    with pytest.raises(openai.BadRequestError):
        ask(client, extra_body={"vllm_xargs": {"kv_budget": 0}})
    assert server.blocks_in_use() == 0


def policy_metrics(server) -> dict[str, float]:
    """Return the policy's metrics by name, without labels. The histogram has only sum and count."""
    samples = re.findall(r"^vllm:kv_policy_(\w+){[^}]*} (\S+)$", server.metrics(), re.MULTILINE)
    return {name: float(value) for name, value in samples if not name.endswith(("_bucket", "_created"))}


def test_a_response_says_what_its_cache_did(served):
    """A chat and a completion report what usage says, the metrics grow by the same numbers, and nobody else reports."""
    server, client, max_blocks = served
    before = policy_metrics(server)
    prompt = [(13 * i) % 40_000 + 100 for i in range(1200)]
    request = {"model": name(client), "prompt": prompt, "max_tokens": 20, "temperature": 0}
    asks_report = {"vllm_xargs": {"kv_report": 1}}
    stops = {
        "logit_bias": {"2": 100},
        "extra_body": asks_report | {"min_tokens": 6},
    }  # the end of a turn, on any processor
    answers = [ask(client, **stops), client.completions.create(**request, extra_body=asks_report)]
    reports = [answer.model_extra["kv_transfer_params"]["kv_report"] for answer in answers]
    for answer, report in zip(answers, reports, strict=True):
        assert report["prompt_tokens"] == answer.usage.prompt_tokens
        assert report["generated_tokens"] == answer.usage.completion_tokens
        assert report["seen_tokens"] == answer.usage.total_tokens - 1
        kept_tokens = min(BUDGET, report["seen_tokens"])
        assert report["kept_tokens_per_head"] == {"min": kept_tokens, "mean": kept_tokens, "max": kept_tokens}
        assert report["evicted_tokens_per_head"]["mean"] == report["seen_tokens"] - kept_tokens
        assert report["bytes"] == report["blocks"] * 64 * (VECTORS + 8) * 90
        assert report["dense_bytes"] == report["seen_tokens"] * VECTORS * 90
    assert answers[0].choices[0].finish_reason == "stop", "a token may be in flight when the answer stops"
    assert reports[1]["evicted_tokens_per_head"]["mean"] > 100 and reports[1]["blocks"] == max_blocks
    assert ask(client, **stops | {"extra_body": {"min_tokens": 6}}).model_extra.get("kv_transfer_params") is None
    deadline = time.monotonic() + 30
    while (after := policy_metrics(server))["retained_share_count"] < before["retained_share_count"] + 3:
        assert time.monotonic() < deadline, "the metrics do not say that the requests have ended"
    for metric, field in (
        ("seen", "seen_tokens"),
        ("kept", "kept_tokens_per_head"),
        ("evicted", "evicted_tokens_per_head"),
    ):
        values = [report[field] if metric == "seen" else report[field]["mean"] for report in (*reports, reports[0])]
        assert after[f"tokens_{metric}_total"] - before[f"tokens_{metric}_total"] == sum(values)
    assert after["info"] == 1 and after["blocks_held"] == after["bytes_held"] == after["dense_bytes"] == 0
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="kv_report must be 0 or 1, got 7") as error:
            list(client.completions.create(**request, stream=stream, extra_body={"vllm_xargs": {"kv_report": 7}}))
        assert error.value.status_code == 400 and "\n" not in error.value.message


LONG = [{"role": "user", "content": "The grass is green. The sky is blue. The sun is yellow. " * 40 + "Name colours."}]
COLOURS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12, "maxItems": 12}
SCHEMA = {"type": "object", "properties": {"colours": COLOURS}, "required": ["colours"], "additionalProperties": False}
BOUNDED = {"messages": LONG, "max_tokens": 400, "extra_body": {"vllm_xargs": {"kv_budget": 512, "kv_report": 1}}}
"""A chat whose prompt alone is longer than its budget."""


def evicted(answer) -> float:
    return answer.model_extra["kv_transfer_params"]["kv_report"]["evicted_tokens_per_head"]["mean"]


def test_an_answer_in_a_given_form(served):
    """Structured output fits its schema where every token of it is written after evicted ones."""
    _, client, _ = served
    form = {"type": "json_schema", "json_schema": {"name": "colours", "schema": SCHEMA}}
    answer = ask(client, **BOUNDED, response_format=form)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    assert answer.usage.completion_tokens > 30 and evicted(answer) > 30


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}], ids=str)
def test_tool_calls(served, choice):
    """A call that the client demands names its tool, and its arguments fit the tool's schema.

    A small model goes on calling where it may, so a stop string ends the answer with the first call. Such answers
    carry no report.
    """
    _, client, _ = served
    tools = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}]
    answer = ask(client, **BOUNDED, tools=tools, tool_choice=choice, stop=["</tool_call>"])
    assert answer.choices[0].message.tool_calls, answer
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "paint" and answer.usage.prompt_tokens > 512 + 30, "more than its budget"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_tokenize_counts_what_a_chat_has(served):
    server, client, _ = served
    counted = httpx.post(f"{server.url}/tokenize", json={"model": name(client), "messages": LONG}).json()
    right = AutoTokenizer.from_pretrained(MODEL).apply_chat_template(LONG, add_generation_prompt=True)["input_ids"]
    assert counted["tokens"] == right and counted["count"] == len(right)
    assert ask(client, messages=LONG, max_tokens=1).usage.prompt_tokens == len(right)
    text = httpx.post(f"{server.url}/detokenize", json={"model": name(client), "tokens": right}).json()["prompt"]
    assert LONG[0]["content"] in text


def test_embeddings_are_refused(served):
    _, client, _ = served
    with pytest.raises(openai.APIStatusError) as error:
        client.embeddings.create(model=name(client), input="some text")
    assert error.value.status_code == 404


@pytest.mark.slow
def test_the_demo_counts_the_tokens_in_the_cache(served):
    """The demo counts the prompt and the answer without its last token, which never enters the cache."""
    server, client, _ = served
    messages = [{"role": "user", "content": "Count from 1 to 100."}]
    usage = client.chat.completions.create(model=name(client), messages=messages, temperature=0, max_tokens=96).usage
    assert usage.completion_tokens > 48, "too short to be looked at while it is written"
    _, length, blocks = demo.ask(server, messages[0]["content"], 96)
    assert length == usage.total_tokens - 1 and blocks >= 1


@pytest.mark.slow
def test_offline_commands_take_the_flags():
    """`vllm bench throughput` and `latency` serve with a policy.

    They run together, each with its engine in its own process.
    """
    options = ["--model", str(MODEL), "--kv-policy", "streaming-llm", "--kv-budget", "64", "--max-model-len", "256"]
    options += ["--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"]
    random = "--dataset-name random --random-input-len 48 --random-output-len 8 --num-prompts 4".split()
    once = "--input-len 48 --output-len 8 --batch-size 2 --num-iters-warmup 1 --num-iters 1".split()
    running = [
        subprocess.Popen(
            [VLLM, "bench", *words, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
        for words in (["throughput", *random], ["latency", *once])
    ]
    for process in running:
        text = process.communicate(timeout=600)[0]
        assert process.returncode == 0, text[-2000:]
        assert "64 tokens per KV head" in text
