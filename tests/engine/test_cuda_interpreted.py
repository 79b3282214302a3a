"""Layers of an engine on a GPU, with Triton's interpreter in the GPU's place, compared with the CPU's path.

The builder's persistent tensors, the layer's forward and the kernels are tested.
"""

import pickle
from types import SimpleNamespace

import pytest
import torch
from engine.cuda_engine import GROUP, MOST, SIZE, SLOTS, attention_of, configure, group_of, load_weights
from engine.cuda_runners import RUNNERS
from kernels.memory import peak_bytes

from kvpop_vllm.attention.layer import FixedBudgetAttention
from kvpop_vllm.attention.profile_run import worst_case_batches
from kvpop_vllm.cache.divided_heads import SharesByVotes
from kvpop_vllm.cache.shares import EqualHeads, cached_region_shares
from kvpop_vllm.cache.step import plan_batch
from kvpop_vllm.kernels import ops
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.scorers import Signals
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

HEADS, BLOCKS, CLOSE = 1, 60, 2e-5
ROLES = {"sinks": 2, "window": 4}
POLICIES = {
    "streaming-llm": {"policy": "streaming-llm", "budget": 32} | ROLES,
    "kvpop": {"policy": "kvpop"},
    "pyramid": {"policy": "l2norm", "budget": 24, "allocator": "pyramid"} | ROLES,
    "attention sinks": {"policy": "tova", "budget": 32, "correction": "moment"} | ROLES,
}
SINKS = torch.tensor([3.0, -1.0])
"""Logits of attention sinks ``[Hq]`` of the layers of that engine."""
PROTECTED = {
    "streaming-llm, 20 tokens": POLICIES["streaming-llm"] | {"protect_prompt": 20},
    "kvpop, prompts": POLICIES["kvpop"] | {"protect_prompt": True},
    "pyramid, prompts": POLICIES["pyramid"] | {"protect_prompt": True},
}
OWN = {"own sizes": POLICIES["streaming-llm"] | {"max_budget": 40, "max_protect": True}}


class Layers:
    """One layer of an engine, or two with unequal budgets, served by both paths from the same bytes.

    Attributes:
        gpu: ``[layers, blocks, H, N, C]`` uint8 pool of the GPU's path; all bytes are 255 at first.
        cpu: the same for the CPU's path.
    """

    def __init__(self, config, sinks=None):
        self.config, self.group = config, group_of(config, HEADS)
        spec = self.group.kv_cache_spec
        layers = 1 if spec.shares is None else 2
        config.device_config.device_type = "cpu"  # the device of the rules' tensors
        shape = layers, BLOCKS, HEADS, SLOTS, spec.state_content_bytes
        self.gpu, self.cpu = (torch.full(shape, 255, dtype=torch.uint8) for _ in "12")
        self.impls = [attention_of(config, layer, HEADS, self.gpu[layer], sinks=sinks) for layer in range(layers)]
        for impl in self.impls:
            impl.attention.impl = "triton"
        self.generator = torch.Generator().manual_seed(0)

    def tokens(self, count):
        """Return q, k, v of ``count`` tokens in all layers."""
        heads = (HEADS * GROUP, HEADS, HEADS)
        return [torch.randn(len(self.impls), count, n, SIZE, generator=self.generator) for n in heads]

    @torch.inference_mode()
    def forward(self, q, k, v, metadata, out):
        """Run the GPU's path, layer by layer."""
        for i, impl in enumerate(self.impls):
            impl.forward(None, q[i], k[i], v[i], self.gpu[i], metadata, out[i])

    def expected(self, q, k, v, counts, lengths, rows, slots):
        """Return the outputs of the CPU's path with the reference kernels."""
        out, policy = torch.empty_like(q), self.group.backend.policy
        table = torch.zeros(len(counts), 32, dtype=torch.int32)
        for row, blocks in zip(table, rows, strict=True):
            row[: len(blocks)] = torch.tensor(blocks)
        after = policy.compression and list(map(policy.compression.after, slots))
        for i, impl in enumerate(self.impls):
            layout, shares = impl.attention.layout, EqualHeads(HEADS)
            pages = blocks_of = layout.view(self.cpu[i])
            if policy.adaptive_head_budgets:
                shares = SharesByVotes(blocks_of, policy.compression, policy.retention.budget)
                pages = shares.pages
            elif impl.shares is not None:
                shares = cached_region_shares(impl.shares, layout, BLOCKS)
                pages = shares.view(self.cpu.view(-1))
            step = plan_batch(layout, slots, counts, lengths, table, after).batch(shares, i)
            cpu = FixedBudgetAttention(layout, impl.attention.rule, impl.scale, "reference", impl.sinks)
            cpu.forward(q[i], k[i], v[i], pages, step, out[i], None, blocks_of)
        return out

    def same_pages(self):
        """Return whether both pools hold the same.

        Keys, values and positions must agree to the bit, scores and states up to rounding.
        """
        pools = [pool[:, 1:] for pool in (self.gpu, self.cpu)]  # without the null block
        bits = [pool.view(torch.int32) for pool in pools]
        differ = bits[0] != bits[1]
        floats = [pool.view(torch.float32)[differ] for pool in pools]
        return torch.allclose(*floats, rtol=1e-3, atol=1e-4)


class Requests:
    """Blocks and lengths of the requests that are served, as a scheduler would keep them.

    Attributes:
        lengths: request -> tokens so far.
        rows: request -> blocks claimed so far, taken from ``free``.
        prompts: request -> tokens of its prompt, None if all tokens are prompt.
        asks: request -> sizes of its own.
    """

    def __init__(self, group, prompts=None):
        self.spec, self.retention, self.prompts = group.kv_cache_spec, group.backend.policy.retention, prompts
        self.lengths, self.rows, self.asks = {}, {}, {}
        self.free = [int(b) for b in 1 + torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(1))]

    def step(self, **counts):
        """Return counts, lengths and rows of a step, in the order of both runners."""
        self.names = names = sorted(counts, key=counts.get)
        for name in names:
            self.lengths[name] = self.lengths.get(name, 0) + counts[name]
            row, sizes = self.rows.setdefault(name, []), self.sizes(name)
            blocks = self.spec.blocks(self.lengths[name], sizes)
            row += [self.free.pop(0) for _ in range(blocks - len(row))]
        return [[x[name] for name in names] for x in (counts, self.lengths, self.rows)]

    def sizes(self, name) -> RequestSlots:
        prompt, protect = (self.prompts or self.lengths)[name], self.spec.protect
        protected = prompt if protect is True else int(protect)
        return self.asks.get(name, RequestSlots(protected, 0, self.retention.budget, self.retention.window))

    def finish(self, name):
        """End a request; its blocks are the next to be claimed."""
        self.free[:0] = self.rows.pop(name)
        del self.lengths[name]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", q_heads=GROUP, kv_heads=HEADS)


@pytest.fixture
def serve(model, tmp_path, monkeypatch):
    """Return ``start(name, prompts, version)``, which returns a policy served by both paths."""

    def start(name, prompts=None, version="V1"):
        settings = dict((POLICIES | PROTECTED | OWN)[name])
        if settings["policy"] == "kvpop":
            settings["scorer"] = str(write_random_scorer(tmp_path / "scorer", model, "mlstm", **ROLES, topk=26))
        config = configure(model, settings, compilation_config={"cudagraph_capture_sizes": [MOST]})
        layers = Layers(config, SINKS if name == "attention sinks" else None)
        prefill = ops.prefill_chunk

        def by_interpreter(*tensors, rule, impl, **options):
            """Run prefill by the interpreter, but sequential rules by the reference.

            The kernels of sequential rules are those of decode steps, which take long when interpreted.
            """
            return prefill(*tensors, rule=rule, impl="reference" if rule.sequential else impl, **options)

        from kvpop_vllm.kernels.triton import _prefill_plan

        monkeypatch.setattr(_prefill_plan, "WIDTH", 64)  # the interpreter takes long for more
        monkeypatch.setattr(ops, "prefill_chunk", by_interpreter)
        return Served(layers, prompts, RUNNERS[version])

    return start


class Served:
    """Both paths, step by step. The graph is recorded before anything is served, like in an engine."""

    def __init__(self, layers, prompts, kind):
        self.layers, self.requests = layers, Requests(layers.group, prompts)
        self.runner = kind(layers.config, layers.group)
        self.q, self.k, self.v = layers.tokens(MOST)
        self.out = torch.empty_like(self.q)
        self.recorded = self.q, self.k, self.v, self.runner.dummy(MOST, capture=True), self.out
        layers.forward(*self.recorded)

    def step(self, graph=False, **counts):
        """Run a step on both paths and return their outputs for its tokens.

        In place of a CUDA graph, the recorded call runs again with the objects it was recorded with.
        """
        counts, lengths, rows = self.requests.step(**counts)
        n, layers, names = sum(counts), self.layers, self.requests.names
        prompts = self.requests.prompts and [self.requests.prompts[name] for name in names]
        asks = [self.requests.asks.get(name) for name in names]
        metadata = self.runner.step(counts, lengths, rows, prompts, asks)
        q, k, v = layers.tokens(n)
        slots = [self.requests.sizes(name) for name in names]
        expected = layers.expected(q, k, v, counts, lengths, rows, slots)
        if graph:
            assert set(counts) == {1}
            for buffer, fresh in zip((self.q, self.k, self.v), (q, k, v), strict=True):
                buffer[:, :n] = fresh
            self.out.fill_(7.0)
            layers.forward(*self.recorded)
            assert (self.out[:, n:] == 0).all(), "rows of padding"
            return self.out[:, :n].clone(), expected
        out = torch.full_like(q, 7.0)
        layers.forward(q, k, v, metadata, out)
        return out, expected

    def check(self, **step):
        actual, expected = self.step(**step)
        torch.testing.assert_close(actual, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("version", RUNNERS)
@pytest.mark.parametrize("name", POLICIES)
def test_equal_to_the_cpus_path(serve, name, version):
    """The GPU's path equals the CPU's for prompts, mixed batches, replayed decodes and reused blocks.

    One row of the replayed batches is padding.
    """
    served = serve(name, version=version)
    assert (served.layers.gpu == 255).all(), "recording has written"
    served.check(a=9, b=30)
    served.check(a=1, b=1, c=20)
    served.check(graph=True, a=1, b=1, c=1)
    served.requests.finish("b")
    served.check(a=1, d=18)
    served.check(graph=True, a=1, d=1)
    assert served.layers.same_pages()
    assert (served.layers.gpu[:, 0] == 255).all(), "the null block has been written"


@pytest.mark.parametrize("version", RUNNERS)
@pytest.mark.parametrize("name", PROTECTED)
def test_protected_prompts(serve, name, version):
    """The paths are equal for protected prompts.

    Chunks lie inside a prompt, across its end and after it. The last token of a prompt is a row of a graph, and so are
    the protected tokens of an answer. Tails begin in decode rows, in a graph and next to chunks.
    """
    served = serve(name, {"a": 9, "b": 30, "c": 21, "d": 10}, version)
    assert (served.layers.gpu[:, 1:] == 255).all(), "recording has written"
    served.check(a=9, b=30)
    served.check(a=1, b=1, c=20)
    served.check(graph=True, a=1, b=1, c=1)
    served.check(graph=True, a=1, b=1, c=1)
    served.requests.finish("b")
    served.check(a=1, c=7, d=18)
    served.check(graph=True, a=1, c=1, d=1)
    if served.requests.spec.protect == 20:  # tokens of the first answer are protected too
        for _ in range(8):
            served.check(graph=True, a=1, c=1, d=1)
        served.check(a=1, c=1, d=3)
        assert served.requests.lengths["a"] == 23
    assert served.layers.same_pages()


@pytest.mark.parametrize("version", RUNNERS)
def test_requests_with_sizes_of_their_own(serve, version):
    """Requests have their own budgets, windows and protection, and the steps of others keep nothing of them."""
    served = serve("own sizes", version=version)
    served.requests.asks = {"a": RequestSlots(0, 0, 40, 10), "b": RequestSlots(20, 0, 24, 6)}
    served.check(a=9, b=30)
    served.check(a=1, b=1, c=20)
    for _ in range(3):
        served.check(graph=True, a=1, b=1, c=1)
    served.check(b=1, a=38, c=14)
    served.check(graph=True, b=1, a=1, c=1)
    served.requests.finish("b")
    served.requests.asks = {"a": RequestSlots(0, 0, 40, 10)}
    served.check(a=1, b=35)
    served.check(graph=True, b=1, c=1)
    assert served.layers.same_pages()


def test_requests_share_a_prefix_that_one_of_them_computes(serve):
    """A request may share prefix blocks that another one computes in the same step.

    It has hit these blocks and runs chunks or a decode row after them.
    """
    served = serve("kvpop, prompts", {"a": 33, "b": 33, "c": 33})
    served.check(a=15)
    for name in "bc":
        served.requests.rows[name] = served.requests.rows["a"][:1]
    served.requests.lengths |= {"b": 16, "c": 32}
    served.check(a=18, b=17)
    served.requests.rows["c"] = served.requests.rows["a"][:2]
    served.check(graph=True, a=1, b=1, c=1)
    served.check(graph=True, a=1, b=1, c=1)
    assert served.layers.same_pages()


def test_a_dummy_run_begins_no_tail(serve):
    """A dummy run of runner V1 leaves the pages of earlier requests unchanged.

    It has their block table. A tail that begins after it is written to the null block only.
    """
    served = serve("kvpop, prompts", {"a": 9, "b": 12})
    served.check(a=9, b=12)
    served.check(graph=True, a=1, b=1)
    before, builder = served.layers.gpu.clone().view(torch.int32), served.layers.group.get_metadata_builder()
    served.runner.dummy(MOST)
    with torch.inference_mode():
        builder._begin_tails([0, 1], [RequestSlots(p, 0, 32, 4) for p in (9, 12)])
    after = served.layers.gpu.view(torch.int32)
    assert torch.equal(before[:, 1:], after[:, 1:]) and not torch.equal(before, after)


def test_a_step_out_of_order_is_no_number(serve):
    """A step out of order makes the outputs of that request NaN.

    Its pages stay as they are, and the other request is served.
    """
    served = serve("streaming-llm")
    served.check(a=9, b=30)
    before = served.layers.gpu.clone()
    served.requests.lengths["a"] += 1
    pages = served.layers.cpu.clone()
    served.layers.expected = lambda q, *tensors: q
    out, _ = served.step(graph=True, a=1, b=1)
    assert out[:, 0].isnan().all() and out[:, 1].isfinite().all()
    changed = (served.layers.gpu != before).any(-1).any(-1).any(-1)[0]
    assert not changed[served.requests.rows["a"]].any() and changed[served.requests.rows["b"]].any()
    assert torch.equal(pages, served.layers.cpu)


@pytest.mark.parametrize("policy", ["streaming-llm", "pyramid"])
def test_a_cache_that_vllm_drops_is_freed(model, policy):
    """A cache that vLLM drops is freed, like the one for measuring CUDA graphs before the real one."""
    from vllm.v1.worker.utils import clear_layer_kv_caches

    layers = Layers(configure(model, POLICIES[policy]))
    impl, cache = layers.impls[0], layers.gpu.clone()[0]
    layer = SimpleNamespace(impl=impl, kv_cache=cache)
    assert impl._bind(cache) is impl._bind(cache)
    assert impl._bind(cache)[0].raw.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    del cache
    clear_layer_kv_caches([layer])
    assert impl._bound is None


def tensors_of(impl) -> list[torch.Tensor]:
    """Return the tensors of a layer's rule and gates."""
    rule = impl.attention.rule
    tensors = [x for x in (*vars(rule).values(), *vars(rule.scorer or rule).values()) if isinstance(x, torch.Tensor)]
    return [*tensors, *impl.gates.state_dict().values()]


@pytest.mark.parametrize("kind", ["kvpop", "trimkv"])
def test_weights_that_are_loaded_again_go_where_graphs_look_for_them(model, kind, tmp_path):
    scorer = write_random_scorer(tmp_path, model, "mlstm" if kind == "kvpop" else kind, **ROLES, topk=10)
    config = configure(model, {"policy": kind, "scorer": str(scorer)})
    config.device_config.device_type = "cpu"
    impl = attention_of(config, 0, HEADS)
    rule, gates, tensors = impl.attention.rule, list(impl.gates), tensors_of(impl)
    before = [x.clone() for x in tensors]
    for x in tensors:
        x.zero_()
    load_weights(impl)
    assert impl.attention.rule is rule and list(impl.gates) == gates and len(gates) == (kind == "trimkv")
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True)) and any(x.any() for x in before)


def test_sinks_that_are_loaded_again_go_where_graphs_look_for_them(model):
    """The kernels read float32 logits of their own, at one address."""
    config, sinks = configure(model, POLICIES["streaming-llm"]), SINKS.bfloat16()
    config.device_config.device_type = "cpu"
    impl = attention_of(config, 0, HEADS, sinks=sinks)
    before = impl.attention.sink_logits
    assert torch.equal(before, SINKS) and before.dtype is torch.float32
    sinks += 1
    load_weights(impl)
    assert impl.attention.sink_logits is before and torch.equal(before, SINKS + 1)


SCORERS = {"kvpop": "mlstm", "kvpop-mlp": "mlp", "trimkv": "trimkv", "dms": "dms", "kvzap": "kvzap"}


@pytest.mark.parametrize("policy", [*SCORERS, "h2o", "momentkv", "pyramid"])
def test_a_layer_lies_on_its_device(model, policy, tmp_path):
    """A layer on the device "meta" in the GPU's place has everything there.

    A tensor left on the CPU could not be combined with its tensors, and no value can be read back.
    """
    options = POLICIES["pyramid"] | {"budget": 96} if policy == "pyramid" else {"policy": policy, "budget": 96}
    if policy in SCORERS:
        scorer = write_random_scorer(tmp_path, model, SCORERS[policy], **ROLES, topk=26)
        options = {"policy": policy, "scorer": str(scorer)}
    sent = pickle.loads(pickle.dumps(configure(model, options)))  # as sent to a worker
    sent.device_config.device_type = "meta"
    impl = attention_of(sent, 1, HEADS, dtype=torch.bfloat16)
    load_weights(impl, torch.bfloat16)
    placed = {(x.device.type, x.dtype) for x in tensors_of(impl)}
    assert placed <= {("meta", torch.float32), ("meta", torch.float64)}
    for gate in impl.gates:
        tokens = torch.empty(3, HEADS, SIZE, dtype=torch.bfloat16, device="meta")
        hidden = tokens.new_empty(3, impl.policy.model.hidden_size)
        scores = gate(Signals(hidden, tokens, tokens, tokens[..., 0] if gate.borrows else None))
        assert (scores.device.type, scores.dtype, scores.shape) == ("meta", torch.float32, (3, HEADS))
    cache = torch.empty(2, BLOCKS, HEADS, SLOTS, impl.attention.layout.slot_bytes, dtype=torch.uint8, device="meta")
    pages, shares, _ = impl._bind(cache[1])
    assert pages.k.device.type == "meta" and shares.by_layer == (policy == "pyramid")
    table = torch.ones(MOST, 9, dtype=torch.int32, device="meta")
    assert {tensor.device.type for tensor in shares.place(1, table, (), table[:, 0], table[:, 0])} == {"meta"}


TOKENS, ROWS = 256, [[*range(1 + 6 * i, 7 + 6 * i)] for i in range(4)]


@pytest.fixture
def profiled(model, tmp_path):
    """Return ``start(policy, **options)``, which returns the layers."""

    def start(policy, **options):
        if policy in SCORERS:
            scorer_options = {"shifted": True} if policy == "dms" else {}
            scorer = write_random_scorer(tmp_path / policy, model, SCORERS[policy], **ROLES, topk=74, **scorer_options)
            options = options | {"scorer": str(scorer)}
        layers = Layers(configure(model, {"policy": policy, "budget": 80} | options))
        layers.gpu.zero_()
        return layers

    return start


@pytest.mark.parametrize(
    "policy, options",
    [
        ("streaming-llm", {"window": 60}), ("kvpop", {}), ("h2o", {}), ("momentkv", {}),
        ("streaming-llm", {"allocator": "pyramid"}), ("trimkv", {}), ("dms", {}), ("random", {}),
        ("kvpop", {"protect_prompt": True}), ("h2o", {"protect_prompt": 200}),
    ],
)  # fmt: skip
def test_the_profiling_run_takes_no_less_than_steps(profiled, policy, options, monkeypatch):
    """The profiling run of vLLM, which has no cache yet, allocates as much as the largest steps."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *args, **options: None)
    layers = profiled(policy, **options)
    impl, (q, k, v) = layers.impls[0], (x[0] for x in layers.tokens(TOKENS))
    out, gate_scores = torch.empty_like(q), torch.zeros(TOKENS, HEADS) if impl.policy.gated else None
    runner, length = RUNNERS["V1"](layers.config, layers.group), layers.config.model_config.max_model_len

    def peak(n, cache, metadata, layers=1):
        step = q[:n], k[:n], v[:n], cache, metadata

        def forward():
            for _ in range(layers):
                impl.forward(None, *step, output=out[:n], gate_scores=gate_scores)

        return peak_bytes(forward)

    def of_a_step(counts, start, prompt=None):
        lengths = [start + n for n in counts]
        rows = [5 * row if impl.policy.max_protect else row for row in ROWS[: len(counts)]]
        metadata = runner.step(counts, lengths, rows, prompt and [prompt] * len(counts))
        impl._bind(layers.gpu[0])[0].position.fill_(start)
        return peak(sum(counts), layers.gpu[0], metadata, layers=3)  # the third one repeats launches

    start = length - TOKENS
    largest = max(of_a_step([1] * MOST, 400), of_a_step([TOKENS], start))
    largest = max(largest, of_a_step([TOKENS // 4] * 4, 80), of_a_step([2] * MOST, 0))
    if impl.policy.max_protect:
        protected = [of_a_step([TOKENS], start, prompt) for prompt in (start, start - 80, start + 100)]
        over_its_end = of_a_step([TOKENS], 0, TOKENS - 30)
        after_one = of_a_step([TOKENS // 4] * 4, 81, 1)
        largest = max(largest, of_a_step([1] * MOST, 400, 200), over_its_end, after_one, *protected)
    allocated = peak(TOKENS, torch.tensor([]), None)
    layout = impl.attention.layout
    pages = 2 * layout.blocks(80, 80) * layout.region_bytes  # some heads have more than others
    assert largest <= allocated <= 1.05 * largest + pages
    assert peak(TOKENS, layers.gpu[0], None) == 0 and (out == 0).all(), "a run of no requests, later on"


def test_kernels_run_on_pages_that_are_made_up(profiled):
    """The profiling run's kernels work on made-up pages, and its chunk begins where the cache is full."""
    impl = profiled("kvpop").impls[0]
    q, k, v = (torch.randn(9, n, SIZE) for n in (HEADS * GROUP, HEADS, HEADS))
    rule, layout = impl.attention.rule, impl.attention.layout
    for pages, batch, n in worst_case_batches(rule, layout, [80], 80, 9, MOST, 512, "cpu"):
        out = torch.full_like(q[:n], 7.0)
        impl.attend(q[:n], k[:n], v[:n], pages, batch, out, None, pages)
        assert (out == 0).all() if batch.decodes else (out.abs().amax((1, 2)) > 0).all()
    assert batch.chunks.starts[0] == 80 and pages.position[pages.layout.state_blocks, 0, 0] == 80 + 9
