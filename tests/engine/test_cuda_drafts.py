"""Speculative decoding on a pretended GPU: outputs are those of ordinary steps without drafts, by the reference.

Both model runners build the metadata, a recorded call stands for the CUDA graph, and Triton's interpreter runs the
kernels.
"""

import dataclasses

import pytest
import torch
from engine.cuda_engine import MOST, SIZE, SLOTS, STREAMING, chosen, configure, only_rank
from engine.cuda_runners import RUNNERS
from engine.draft_models import write_eagle3, write_mtp
from engine.test_cuda_interpreted import BLOCKS, CLOSE, GROUP, HEADS, ROLES, Layers, Requests
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

from kvpop_vllm.attention.layer import FixedBudgetAttention
from kvpop_vllm.cache.shares import EqualHeads, cached_region_shares
from kvpop_vllm.cache.step import plan_batch
from kvpop_vllm.config import ConfigError
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.testing import write_random_scorer, write_tiny_model
from kvpop_vllm.vllm_glue.run.cache_groups import get_kv_cache_groups, with_block_sizes
from kvpop_vllm.vllm_glue.start.backend_choice import load_draft_model
from kvpop_vllm.vllm_glue.start.cuda import check_drafts
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy
from kvpop_vllm.vllm_glue.start.refusals import check_layers, draft_layers

DRAFTS, LENGTH = 3, 110
METHODS = {
    "V1": {"method": "custom_class", "model": "engine.proposer.ForcedDrafts"},
    "V2": {"method": "ngram"},
}
"""Drafts of each model runner; none of them is made here."""
POLICIES = {
    "streaming-llm": {"policy": "streaming-llm", "budget": 32} | ROLES,
    "kvpop": {"policy": "kvpop"},
    "kvpop, 12 tokens": {"policy": "kvpop", "protect_prompt": 12},
    "pyramid, 12 tokens": {"policy": "l2norm", "budget": 24, "allocator": "pyramid", "protect_prompt": 12} | ROLES,
    "own sizes": {"policy": "streaming-llm", "budget": 32, "max_budget": 40, "max_protect": True} | ROLES,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", q_heads=GROUP, kv_heads=HEADS)


def speculating(version="V1", **options):
    """Return engine arguments with drafts."""
    return {"speculative_config": METHODS[version] | {"num_speculative_tokens": DRAFTS}} | options


@pytest.fixture
def serve(model, tmp_path):
    """Return ``start(name, version, prompts, asks)``, which returns a served policy."""

    def start(name, version, prompts=None, asks=None):
        settings = dict(POLICIES[name])
        if settings["policy"] == "kvpop":
            settings["scorer"] = str(write_random_scorer(tmp_path / "scorer", model, "mlstm", **ROLES, topk=26))
        compilation = {"cudagraph_capture_sizes": [MOST * (1 + DRAFTS)]}
        config = configure(model, settings, compilation_config=compilation, **speculating(version))
        return Speculating(config, version, prompts, asks or {})

    return start


class Speculating:
    """A policy that is served step by step on the GPU's path, and requests whose texts are known.

    Attributes:
        texts: request -> queries, keys and values of its text in all layers, ``[layers, LENGTH, heads, D]`` each.
        expected: request -> outputs of ordinary steps for its text, without drafts.
    """

    def __init__(self, config, version, prompts, asks):
        self.layers = Layers(config)
        self.requests, self.runner = Requests(self.layers.group, prompts), RUNNERS[version](config, self.layers.group)
        self.requests.asks, self.texts, self.expected = asks, {}, {}
        self.buffers = self.layers.tokens(MOST * (1 + DRAFTS))
        self.out = torch.empty_like(self.buffers[0])
        self.recorded = *self.buffers, self.runner.dummy(MOST, capture=True), self.out
        self.layers.forward(*self.recorded)

    def text(self, name):
        """Return the text of a request."""
        if name not in self.texts:
            self.texts[name] = self.layers.tokens(LENGTH)
            self.expected[name] = self.ordinary(*self.texts[name], self.requests.sizes(name))
        return self.texts[name]

    @torch.inference_mode()
    def ordinary(self, q, k, v, slots):
        """Return the outputs of a text by steps of one token without speculation, with the reference kernels."""
        out = torch.empty_like(q)
        for i, impl in enumerate(self.layers.impls):
            layout = dataclasses.replace(impl.attention.layout, drafts=0, draft_query_bytes=0)
            pool = torch.zeros_like(self.layers.cpu)
            pages, shares, blocks = layout.view(pool[i]), EqualHeads(HEADS), layout.view(pool[i])
            if impl.shares is not None:
                shares = cached_region_shares(impl.shares, layout, BLOCKS)
                pages = shares.view(pool.view(-1))
            attention = FixedBudgetAttention(layout, impl.attention.rule, impl.scale, "reference")
            table = torch.arange(1, 33, dtype=torch.int32).unsqueeze(0)
            for t in range(LENGTH):
                batch = plan_batch(layout, [slots], [1], [t + 1], table).batch(shares, i)
                step = (x[i, t : t + 1] for x in (q, k, v))
                attention.forward(*step, pages, batch, out[i, t : t + 1], None, blocks)
        return out

    def check(self, graph=False, **steps):
        """Run a step, and compare what it computes for tokens of the texts with the outputs without drafts.

        Args:
            graph: True to run the recorded call.
            steps: request -> tokens of a chunk, or drafts of a row and how many of them are right.
        """
        rows = {name: step if isinstance(step, tuple) else (0, step - 1) for name, step in steps.items()}
        drafts = {name: [0] * number for name, (number, _) in rows.items() if number}
        counts = {name: 1 + number if number else 1 + right for name, (number, right) in rows.items()}
        names = sort_batch_req_ids(counts, drafts, 1 + DRAFTS)
        before = {name: self.requests.lengths.get(name, 0) for name in names}
        place = [self.requests.step(**{name: counts[name]}) for name in names]
        columns = [[row[i][0] for row in place] for i in range(3)]
        texts, outputs = [self.text(name) for name in names], []
        for name, text in zip(names, texts, strict=True):
            c, (number, right) = before[name], rows[name]
            right = [x[:, c : c + 1 + right] for x in text]
            wrong = self.layers.tokens(number - rows[name][1]) if number else [x[:, :0] for x in text]
            outputs.append([torch.cat(pair, 1) for pair in zip(right, wrong, strict=True)])
            self.requests.lengths[name] = c + 1 + rows[name][1]
        prompts = self.requests.prompts and [self.requests.prompts[name] for name in names]
        asks = [self.requests.asks.get(name) for name in names]
        numbers = [len(drafts.get(name, ())) for name in names]
        metadata = self.runner.step(*columns, prompts, asks, numbers)
        if any(numbers):  # both runners say which tokens are drafts
            assert self.layers.group.get_metadata_builder().drafts == numbers
        q, k, v = (torch.cat(x, 1) for x in zip(*outputs, strict=True))
        n = q.shape[1]
        if graph:
            assert set(counts.values()) == {1 + DRAFTS}
            for buffer, fresh in zip(self.buffers, (q, k, v), strict=True):
                buffer[:, :n] = fresh
            self.out.fill_(7.0)
            self.layers.forward(*self.recorded)
            assert (self.out[:, n:] == 0).all(), "rows of padding"
            out = self.out[:, :n]
        else:
            out = torch.full_like(q, 7.0)
            self.layers.forward(q, k, v, metadata, out)
        first = 0
        for name in names:
            c, right = before[name], rows[name][1]
            actual, expected = out[:, first : first + 1 + right], self.expected[name][:, c : c + 1 + right]
            assert torch.allclose(actual, expected, rtol=0, atol=CLOSE), (
                f"{name} at {c}: {(actual - expected).abs().max()}"
            )
            first += counts[name]

    def restart(self, name):
        """Have a request begin again, in other blocks, as one that was preempted."""
        self.requests.finish(name)


@pytest.mark.parametrize("name, version", [("streaming-llm", "V1"), ("kvpop", "V2")])
def test_every_number_of_accepted_drafts(serve, name, version):
    """Chunks, steps with other numbers of drafts, and graphs with each number of right drafts; one row is padding."""
    served = serve(name, version)
    assert (served.layers.gpu == 255).all(), "recording has written"
    served.check(a=9, b=30)
    served.check(a=(3, 2), b=(3, 0), c=20)
    for right in range(1 + DRAFTS):
        served.check(graph=True, a=(3, right), b=(3, DRAFTS - right), c=(3, (right + 1) % 4))
    served.check(a=(2, 1), b=(3, 3), c=1)
    served.restart("b")
    served.check(a=(3, 3), c=(1, 0), b=18)
    assert (served.layers.gpu[:, 0] == 255).all(), "the null block has been written"


@pytest.mark.parametrize("name, version", [("kvpop, 12 tokens", "V1"), ("pyramid, 12 tokens", "V2")])
def test_tails_begin_among_drafts(serve, name, version):
    """A prefix of 12 tokens ends after, among or before accepted drafts, of steps in graphs and next to chunks."""
    served = serve(name, version)
    served.check(a=9, b=9, c=9)
    served.check(graph=True, a=(3, 0), b=(3, 2), c=(3, 3))
    served.check(graph=True, a=(3, 1), b=(3, 0), c=(3, 3))
    served.check(a=(3, 2), b=(2, 1), c=(1, 1))
    served.check(graph=True, a=(3, 3), b=(3, 3), c=(3, 0))
    served.restart("a")
    served.check(b=(3, 3), c=(3, 1), a=40)
    served.check(graph=True, a=(3, 3), b=(3, 0), c=(3, 3))


def test_short_chunks(serve):
    """Chunks of as many tokens as a row may have run as rows, also in a graph; longer ones follow them."""
    served = serve("pyramid, 12 tokens", "V1", dict.fromkeys("ab", 60))
    served.check(graph=True, a=4, b=4)
    served.check(a=2, b=3)
    served.check(graph=True, a=4, b=4)
    served.check(a=4, b=30)
    served.check(a=19, b=4)
    served.check(a=14, b=1)
    served.check(a=(3, 1), b=(3, 3))


def test_a_prompt_goes_on_after_staged_drafts(serve):
    """A chat's next turn begins with a chunk, after drafts that have been accepted and are not in the cache yet."""
    served = serve("kvpop, 12 tokens", "V2")
    served.check(a=10, b=20)
    served.check(graph=True, a=(3, 3), b=(3, 3))
    served.check(a=20, b=25)
    served.check(graph=True, a=(3, 2), b=(3, 0))
    served.check(a=(3, 1), b=9)


def test_requests_with_sizes_of_their_own(serve):
    """Requests have their own budgets, windows and protection."""
    asks = {"a": RequestSlots(0, 0, 40, 10), "b": RequestSlots(20, 0, 24, 6), "d": RequestSlots(7, 0, 24, 3)}
    served = serve("own sizes", "V1", asks=asks)
    served.check(a=9, b=18)
    served.check(a=(3, 2), b=(3, 3), c=20, d=30)
    for right in (3, 0, 3):
        served.check(graph=True, a=(3, 3), b=(3, right), c=(3, right), d=(3, 3))


def test_a_window_with_too_few_tokens_is_no_number(serve):
    """More drafts than a request's window has tokens make its outputs NaN, and its pages stay as they are."""
    asks = {"a": RequestSlots(0, 0, 24, 2)}
    served = serve("own sizes", "V1", asks=asks)
    served.check(a=9, b=18)
    served.check(a=(2, 1), b=(3, 3))
    before, rows = served.layers.gpu.clone(), served.requests.rows
    with pytest.raises(AssertionError, match="a at 11"):
        served.check(graph=True, a=(3, 1), b=(3, 2))
    assert served.out[0, 0:4].isnan().all() and served.out[0, 4:8].isfinite().all()
    changed = (served.layers.gpu != before).any(-1).any(-1).any(-1)[0]
    assert not changed[rows["a"]].any() and changed[rows["b"]].any()


def test_what_is_not_verified_on_a_gpu(model):
    """Rules that read attention, and drafts that do not fit into a window, are refused with the number allowed."""

    def refusal(policy):
        with pytest.raises(ConfigError) as caught:
            configure(model, policy, **speculating())
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for policy in ({"policy": "h2o"}, {"policy": "tova"}, {"policy": "momentkv"}, STREAMING | {"correction": "moment"}):
        message = refusal({"budget": 64} | policy)
        assert "reads attention or corrects outputs, whose largest number there is 0" in message
    for name in ("rkv", "vase"):
        assert "drafts under a policy that compresses prompts or ranks tokens in rounds" in refusal(
            {"policy": name, "budget": 80}
        )
    message = refusal({"policy": "l2norm", "budget": 64})
    assert message.startswith("3 drafts do not fit into a window of 1 tokens") and "to at most 1, or" in message
    config = configure(model, STREAMING | {"window": DRAFTS}, **speculating())
    check_drafts(config, DRAFTS, "kv_budget")
    with pytest.raises(ConfigError, match="to at most 2, or raise kv_budget"):
        check_drafts(config, DRAFTS - 1, "kv_budget")


@pytest.mark.parametrize("version", RUNNERS)
def test_graphs_hold_requests_with_all_their_drafts(model, version):
    """Both runners keep full graphs for decoding, up to all requests that run together."""
    config = configure(model, max_num_seqs=300, max_num_batched_tokens=4096, **speculating(version))
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert sizes[-1] == config.compilation_config.max_cudagraph_capture_size == 300 * (1 + DRAFTS)
    backend = Layers(configure(model, **speculating(version))).group.backend
    support = backend.get_builder_cls().get_cudagraph_support(config, None)
    resolve = config.compilation_config.resolve_cudagraph_mode_and_sizes
    mode = resolve(support, backend.__name__, 1 + DRAFTS, use_v2_model_runner=version == "V2")
    assert mode.name == "FULL_AND_PIECEWISE"


def test_a_layers_profiling_run_verifies(model, monkeypatch):
    """The largest steps of the profiling run have all drafts of all requests."""
    from kvpop_vllm.attention import profile_run

    impl = Layers(configure(model, **speculating())).impls[0]
    limits = 40, MOST, 512, "cpu"
    steps = profile_run.worst_case_batches(impl.attention.rule, impl.attention.layout, [80], 80, *limits)
    _, batch, n = next(iter(steps))
    assert n == MOST * (1 + DRAFTS) and batch.drafts.tolist() == [-1] * MOST


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_layers_that_draft(model, tmp_path, method):
    """Layers of EAGLE3 and of multi-token prediction get vLLM's backend, and dense caches in a group of their own."""
    heads, size = (HEADS, SIZE) if method == "eagle3" else (2, 32)
    speculation = write_eagle3(tmp_path, str(model)) if method == "eagle3" else write_mtp(tmp_path)
    target = model if method == "eagle3" else tmp_path
    config, stock = (configure(target, policy, speculative_config=speculation) for policy in (STREAMING, None))
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert stock.scheduler_config.async_scheduling and not config.scheduler_config.async_scheduling
    ours, options = chosen(config), {"dtype": torch.bfloat16}
    assert ours.get_name() == "CUSTOM" and ours.drafts == DRAFTS
    assert load_draft_model(chosen, config, **options) is chosen(stock, **options)
    plain = FullAttentionSpec(block_size=SLOTS, num_kv_heads=heads, head_size=size, dtype=torch.float32)
    with only_rank(config):
        fixed = ours.customize_spec(plain)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    specs = {names[0]: fixed, names[1]: fixed, names[2]: plain}
    shape = engine_policy(config).model
    check_layers(specs, shape, draft_layers(config))
    for wrong in (specs | {names[1]: plain}, specs | {names[2]: fixed}):
        with pytest.raises(ConfigError, match="layers that bring an attention backend of their own"):
            check_layers(wrong, shape, draft_layers(config))
    (sized,) = with_block_sizes([specs], config)
    config.cache_config.kv_cache_layout = "LBHNC"
    groups = get_kv_cache_groups(config, sized)
    assert [group.layer_names for group in groups] == [[name] for name in names]
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    with pytest.raises(ConfigError, match="form 2 cache groups, among which heads cannot share slots"):
        pyramid = configure(target, STREAMING | {"allocator": "pyramid"}, speculative_config=speculation)
        with only_rank(pyramid):
            fixed = chosen(pyramid).customize_spec(plain)
        with_block_sizes([{names[0]: fixed, names[1]: fixed, names[2]: plain}], pyramid)
