"""A real server with cartridges, called by the openai client: names, usage, loading, unloading, refusals."""

import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
import torch
from serving import Server
from transformers import AutoTokenizer

from kvpop_vllm.compaction.base_model import base_of
from kvpop_vllm.compaction.cartridge import CartridgeConfig, write_cartridge
from kvpop_vllm.compaction.prompt_place import place_of

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
SLOTS = 128


def write(folder: Path, **changes) -> str:
    """Write the keys and values of no token, which attention can tell from those of another cartridge."""
    base = base_of(MODEL)
    torch.manual_seed(sum(map(ord, folder.name)))
    shape = base["num_kv_heads"], changes.get("slots", SLOTS), base["head_dim"]
    layers = [(torch.randn(shape), torch.randn(shape) * 0.1, torch.randn(shape[:2])) for _ in range(base["num_layers"])]
    fields = {"slots": SLOTS, "next_position": SLOTS, "method": "random", "provenance": {}}
    write_cartridge(folder, CartridgeConfig(**(base | fields | changes)), layers)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("cartridges")
    return {name: write(root / name) for name in ("one", "second", "loaded")}


@pytest.fixture(scope="module")
def served(folders):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        names = [f"{name}={folders[name]}" for name in ("one", "second")]
        options = ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(512 << 20), "--enforce-eager"]
        # In bfloat16 a request's answer depends on how many others share its step.
        options += ["--enable-prompt-tokens-details", "--served-model-name", "base", "--dtype", "float32"]
        with Server(str(MODEL), "--kv-cartridge", *names, *options) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
            ask(client, "base")  # the gauge of blocks in use is set by steps
            yield server, client


def ask(client, model: str, **options):
    defaults = {"messages": [{"role": "user", "content": "Who wrote this?"}], "temperature": 0, "max_tokens": 16}
    return client.chat.completions.create(model=model, **(defaults | options))


def test_cartridges_are_models_with_a_parent(served):
    _, client = served
    listed = {model.id: model.model_extra.get("parent") for model in client.models.list().data}
    assert listed == {"base": None, "one": "base", "second": "base"}


def test_a_cartridge_is_named_as_a_model_or_in_the_request(served):
    """The slots count as cached prompt tokens, and the text of the prompt has no placeholder."""
    _, client = served
    base, one, second = (ask(client, name) for name in ("base", "one", "second"))
    assert len({answer.choices[0].message.content for answer in (base, one, second)}) == 3
    assert (base.model, one.model) == ("base", "one")
    assert one.usage.prompt_tokens == base.usage.prompt_tokens + SLOTS
    assert one.usage.prompt_tokens_details.cached_tokens == SLOTS
    same = ask(client, "base", extra_body={"vllm_xargs": {"kv_cartridges": ["one"]}})
    assert same.choices[0].message.content == one.choices[0].message.content and same.model == "base"
    one_and_second = ask(client, "base", extra_body={"vllm_xargs": {"kv_cartridges": ["one", "second"]}})
    assert one_and_second.usage.prompt_tokens_details.cached_tokens == 2 * SLOTS
    deltas = [event.choices[0].delta.content or "" for event in ask(client, "one", stream=True) if event.choices]
    assert "".join(deltas) == one.choices[0].message.content
    echo = client.completions.create(model="one", prompt="Once upon", max_tokens=4, temperature=0, echo=True)
    assert echo.choices[0].text.startswith("Once upon") and echo.choices[0].text.count("Once") == 1


def test_a_cartridge_in_the_message_of_a_chat(served, tmp_path):
    """It holds what the chat template writes before a message, and serves chats that begin as it does, and no others."""
    server, client = served
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    usual, brief = (place_of(tokenizer, system=system).head for system in (None, "Be brief."))
    assert tokenizer.decode(usual).endswith("<|im_start|>user\n") and usual != brief
    for name, head in (("usual", usual), ("brief", brief)):
        path = write(tmp_path / name, head=head)
        assert post(server, "load_kv_cartridge", name=name, path=path).status_code == 200
    base = ask(client, "base").usage.prompt_tokens
    question = [{"role": "user", "content": "Who wrote this?"}]
    briefed = [{"role": "system", "content": "Be brief."}, *question]
    first = ask(client, "usual").usage.prompt_tokens
    assert first == base - len(usual) + SLOTS
    turns = [*question, {"role": "assistant", "content": "Nobody."}, {"role": "user", "content": "Why?"}]
    assert ask(client, "usual", messages=turns).usage.prompt_tokens_details.cached_tokens == first
    assert ask(client, "brief", messages=briefed).usage.prompt_tokens == base - len(usual) + SLOTS
    for name, messages in (("usual", briefed), ("brief", question)):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="stands in the first message of a chat") as caught:
                list(ask(client, name, messages=messages, stream=stream))
            assert "\n" not in caught.value.message
    with pytest.raises(openai.BadRequestError, match="for other prompts make it with 'kvpop compact --place front'"):
        client.completions.create(model="usual", prompt="Once upon", max_tokens=4)
    with pytest.raises(
        openai.BadRequestError, match="usual and one were made with different system messages or places"
    ):
        ask(client, "base", extra_body={"vllm_xargs": {"kv_cartridges": ["usual", "one"]}})
    for name in ("usual", "brief"):
        assert post(server, "unload_kv_cartridge", name=name).status_code == 200
    ask(client, "base")  # the gauge of blocks in use is set by steps


def test_one_copy_for_all_requests(served):
    server, client = served
    pinned = server.blocks_in_use()
    assert pinned == 2 * SLOTS // 64
    blocks_held, texts = [], []

    def run():
        texts.append(ask(client, "one", max_tokens=60, extra_body={"ignore_eos": True}).choices[0].message.content)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        blocks_held.append(server.blocks_in_use())
    assert len(set(texts)) == 1
    assert max(blocks_held) <= pinned + 8 * 2  # a prompt of 40 tokens and an answer of 60
    assert server.blocks_in_use() == pinned


def post(server, route: str, **body) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)


def test_loading_and_unloading(served, folders):
    server, client = served
    before = server.blocks_in_use()
    assert post(server, "load_kv_cartridge", name="later", path=folders["loaded"]).json() == {
        "name": "later",
        "slots": SLOTS,
    }
    assert ask(client, "later").usage.prompt_tokens_details.cached_tokens == SLOTS
    assert server.blocks_in_use() == before + SLOTS // 64
    refusal = post(server, "load_kv_cartridge", name="later", path=folders["loaded"])
    assert refusal.status_code == 400 and "is taken" in refusal.json()["error"]["message"]
    named = post(server, "load_kv_cartridge", name="hub", path="owner/name")  # which nothing may download
    assert named.status_code == 400 and "is not a folder of this machine" in named.json()["error"]["message"]
    stream = ask(client, "later", stream=True, max_tokens=1800, extra_body={"ignore_eos": True})
    read = [next(stream), next(stream)]
    busy = post(server, "unload_kv_cartridge", name="later")
    assert busy.status_code == 409, (busy.text, *read, len(list(stream)), server.blocks_in_use())
    assert "1 requests use the cartridge 'later'" in busy.json()["error"]["message"]
    stream.close()
    deadline = time.monotonic() + 300
    while (done := post(server, "unload_kv_cartridge", name="later")).status_code == 409:
        assert time.monotonic() < deadline, "the request that was broken off still runs"
        time.sleep(0.2)
    assert done.json() == {"name": "later"}
    ask(client, "base")
    assert server.blocks_in_use() == before
    assert post(server, "unload_kv_cartridge", name="later").status_code == 404
    with pytest.raises(openai.NotFoundError):
        ask(client, "later")


@pytest.mark.parametrize("stream", [False, True])
def test_refused_requests(served, stream):
    server, client = served
    before = server.blocks_in_use()
    for model, asks, error, text in (
        ("nothing", None, openai.NotFoundError, "does not exist"),
        ("base", ["nothing"], openai.NotFoundError, "the cartridge 'nothing' does not exist: name one of one, second"),
        ("base", ["one", "one"], openai.BadRequestError, "names a cartridge twice"),
        (
            "one",
            ["second"],
            openai.BadRequestError,
            "the model 'one' is a cartridge: name all of them in kv_cartridges",
        ),
    ):
        body = {"vllm_xargs": {"kv_cartridges": asks}} if asks else {}
        with pytest.raises(error, match=text) as caught:
            list(ask(client, model, stream=stream, extra_body=body))
        assert "\n" not in caught.value.message
    ask(client, "base")
    assert server.blocks_in_use() == before


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"rope": {"rope_type": "default", "rope_theta": 5.0}}, "rotary embeddings with rope_theta = 5.0"),
        ({"head_dim": 32, "num_kv_heads": 3}, "head_dim = 32"),
        ({"slots": 2048, "next_position": 2048}, "2048 slots: raise --max-model-len 2048 above them"),
        ({"base": {"config": "0", "weights": None}}, "a model of other sizes"),
    ],
)
def test_folders_that_cannot_be_loaded(served, tmp_path, changes, text):
    """Each is one line, and the server goes on."""
    server, client = served
    base = base_of(MODEL) | {"slots": SLOTS, "next_position": SLOTS, "method": "random", "provenance": {}} | changes
    config = CartridgeConfig(**base)
    shape = config.num_kv_heads, config.slots, config.head_dim
    layers = [(torch.zeros(shape), torch.zeros(shape), None) for _ in range(config.num_layers)]
    write_cartridge(tmp_path / "c", config, layers)
    answer = post(server, "load_kv_cartridge", name="x", path=str(tmp_path / "c"))
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and text in message and "\n" not in message
    assert ask(client, "one").usage.prompt_tokens_details.cached_tokens == SLOTS


def test_a_cartridge_that_the_pool_cannot_hold(served, tmp_path):
    server, _ = served
    slots = 1984
    refused = []
    for i in range(12):
        folder = write(tmp_path / str(i), slots=slots, next_position=slots)
        answer = post(server, "load_kv_cartridge", name=f"big{i}", path=folder)
        if answer.status_code != 200:
            refused.append(answer.json()["error"]["message"])
            break
    assert refused and "leaves no room for a request of --max-model-len 2048" in refused[0]
    for j in range(i):
        assert post(server, "unload_kv_cartridge", name=f"big{j}").status_code == 200
