"""Compression of prompts and rounds on a GPU, whose place Triton's interpreter takes, compared with the CPU's path.

What lies between two steps is done when the second one's metadata are built, ahead of a CUDA graph.
"""

import pytest
import torch
from engine import test_cuda_interpreted as interpreted
from engine.cuda_engine import GROUP, MOST, SIZE, SLOTS, configure, group_of
from engine.cuda_runners import RUNNERS
from engine.test_cuda_interpreted import Layers, Served
from engine.test_cuda_runners import NoWaiting, common_of
from policies.matrix import random_statistics_folder
from torch.utils._python_dispatch import TorchDispatchMode

from kvpop_vllm.kernels.draws import signed
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.testing import write_tiny_model

HEADS = 2
COMPRESSING = {
    "snapkv": {"policy": "snapkv", "budget": 24, "window": 6},
    "pyramidkv": {"policy": "pyramidkv", "budget": 24, "window": 6},
    "adakv": {"policy": "adakv", "budget": 24, "window": 6},
    "attention-matching": {"policy": "attention-matching", "budget": 24, "window": 6},
}
ROUNDS = {
    "vase": {"policy": "vase", "budget": 24, "window": 6, "sinks": 2, "protect_prompt": 0},
    "rkv": {"policy": "rkv", "budget": 24, "protect_prompt": 0},
    "rkv, prompts": {"policy": "rkv", "budget": 24, "protect_prompt": True},
    "triattention": {"policy": "triattention", "budget": 24, "window": 6, "sinks": 2, "protect_prompt": 0},
    "rkv, pyramid": {"policy": "rkv", "budget": 24, "protect_prompt": 0, "allocator": "pyramid"},
}


class Between(Layers):
    """Layers of an engine under a policy that has something to do between steps."""

    def __init__(self, config, sinks=None):
        super().__init__(config, sinks)
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(len(self.impls))]
        self.group.get_metadata_builder().layer_names = names


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", q_heads=HEADS * GROUP, kv_heads=HEADS)


@pytest.fixture
def settings(model, tmp_path):
    """Return ``find(name)``, which returns the settings of a policy."""

    def find(name):
        options = dict((COMPRESSING | ROUNDS)[name])
        if name == "triattention":
            options["calibration"] = str(random_statistics_folder(tmp_path, ModelShape.of(model, 512)))
        return options

    return find


@pytest.fixture
def serve(model, settings, monkeypatch):
    """Return ``start(name, prompts, version)``, which returns a policy served by both paths."""
    from kvpop_vllm.kernels.triton import _prefill_plan

    monkeypatch.setattr(interpreted, "HEADS", HEADS)
    monkeypatch.setattr(_prefill_plan, "WIDTH", 64)  # the interpreter takes long for more

    def start(name, prompts, version="V1"):
        config = configure(model, settings(name), compilation_config={"cudagraph_capture_sizes": [MOST]})
        served = Served(Between(config), prompts, RUNNERS[version])
        builder, sizes = served.layers.group.get_metadata_builder(), served.requests.sizes
        if builder.policy.draws:  # a request has the same seed in all its steps
            records = {request: sizes(request)._replace(seed=7 * i) for i, request in enumerate(prompts)}
            served.requests.asks = records

            def with_the_servers(request):
                return sizes(request)._replace(seed=signed(builder.seed + records[request].seed))

            monkeypatch.setattr(served.requests, "sizes", with_the_servers)
        return served

    return start


@pytest.mark.parametrize("version", RUNNERS)
@pytest.mark.parametrize("name", COMPRESSING)
def test_prompts_are_compressed(serve, name, version):
    """A prompt ends with a chunk, with a row of a graph, within a chunk, and with a chunk of one token.

    One prompt is shorter than the budget. The next token comes in a graph and together with chunks.
    """
    served = serve(name, {"a": 41, "b": 34, "c": 50, "d": 15}, version)
    served.check(a=41, b=33)
    served.check(a=1, b=1, d=15)
    served.check(graph=True, a=1, b=1, d=1)
    served.check(a=1, b=1, d=1, c=55)
    for _ in range(2):
        served.check(graph=True, a=1, b=1, c=1, d=1)
    served.requests.finish("a")
    served.requests.prompts |= {"e": 38}
    served.check(b=1, c=1, e=37)
    served.check(graph=True, b=1, c=1, e=1)
    served.check(graph=True, b=1, c=1, e=1)
    assert (served.layers.gpu[:, 0] == 255).all(), "the null block has been written"


@pytest.mark.parametrize("version", RUNNERS)
@pytest.mark.parametrize("name", ROUNDS)
def test_rounds(serve, name, version):
    """Rounds are due within chunks, at their ends, and after rows of graphs."""
    served = serve(name, {"a": 40, "b": 61, "c": 20}, version)
    served.check(a=40, b=27)
    served.check(a=1, b=34)
    served.check(graph=True, a=1, b=1)
    served.check(a=1, b=1, c=20)
    for _ in range(9):
        served.check(graph=True, a=1, b=1, c=1)
    served.requests.finish("b")
    served.check(a=1, c=33)
    for _ in range(3):
        served.check(graph=True, a=1, c=1)
    assert (served.layers.gpu[:, 0] == 255).all(), "the null block has been written"


@pytest.mark.parametrize("name", ["snapkv", "adakv", "vase", "rkv", "triattention"])
def test_no_value_is_asked_for(model, settings, name):
    """Rounds and compression between steps read no value from the device "meta", whose tensors have none."""
    config = configure(model, settings(name))
    config.device_config.device_type = "meta"
    group = group_of(config, device="meta")
    builder, policy = group.get_metadata_builder(), group.backend.policy
    cache = torch.empty(40, HEADS, SLOTS, builder.layout.slot_bytes, dtype=torch.uint8, device="meta")
    impl = interpreted.attention_of(config, 0, HEADS, cache)
    prompt = 63 if policy.compresses else 0
    builder.take_requests([None] * 3, [prompt] * 3)
    due = []
    run = impl.attention.between_steps
    impl.attention.between_steps = lambda *arguments: (due.append(arguments[4].starts), run(*arguments))
    for counts, rows in (([1, 1, 1], MOST), ([1, 30, 7], 3)):
        common = common_of(counts, rows)
        if not policy.compresses:  # 63 tokens are no end of a round
            common.seq_lens_cpu_upper_bound += 1
        with NoWaiting():
            batch = builder.build(0, common).batch(0, impl._bind(cache)[1])
        assert batch.table.device.type == batch.positions.device.type == "meta"
        assert SIZE == impl.head_size and due.pop() == [63 + (not policy.compresses)] * (3 if rows == MOST else 1)


class Torch(TorchDispatchMode):
    """A mode that adds the ops of torch which run on a device to a list; views and empty tensors do not."""

    NOTHING = (
        "empty",
        "new_empty",
        "view",
        "slice",
        "select",
        "expand",
        "unsqueeze",
        "transpose",
        "as_strided",
        "detach",
        "alias",
    )

    def __init__(self, names: list[str]):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not name.startswith(self.NOTHING):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("protect", [0, True])
@pytest.mark.parametrize("name", ["streaming-llm", "snapkv", "rkv"])
def test_launches_of_a_decode_step(model, settings, monkeypatch, name, protect):
    """A layer launches two kernels, and torch nothing: also with protected prompts, and where queries are stored."""
    from triton.runtime.interpreter import InterpretedFunction

    options = interpreted.POLICIES[name] if name == "streaming-llm" else settings(name)
    if name != "snapkv":
        options = options | {"protect_prompt": protect}
    monkeypatch.setattr(interpreted, "HEADS", HEADS)
    config = configure(model, options, compilation_config={"cudagraph_capture_sizes": [MOST]})
    layers = Between(config)
    metadata = RUNNERS["V1"](config, layers.group).step(
        [1] * MOST, [34, 22] * 2, [[*range(1 + 10 * i, 8 + 10 * i)] for i in range(MOST)], [20] * MOST
    )
    names = []
    monkeypatch.setattr(
        InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **options: names.append(self.fn.__name__)
    )
    (q, k, v), cache = layers.tokens(MOST), layers.gpu[0]
    out = torch.empty_like(q)
    metadata.batch(0, layers.impls[0]._bind(cache)[1])  # made once for all layers
    with Torch(names):
        layers.impls[0].forward(None, q[0], k[0], v[0], cache, metadata, out[0])
    assert names == ["_evict_and_insert", "_attend"]
