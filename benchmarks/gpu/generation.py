"""Decoding of a model of Qwen3-8B's shape with `KVpopCache` and transformers' static cache (KVpop Figure 4).

Weights are random. There is no prefill: caches are written in the state after the context, with random keys,
values and scores and, for KVpop, with position words, token counts and positions that its own reader accepts;
the scorers' states are those after one token. Time and memory do not depend on which tokens are held.

The static cache is full, and attended to without the mask and the repeated keys that transformers gives it in
a graph, which is faster. A pass is one greedy token of every row, from embedding to argmax. Its floor is the
bytes of weights and cache that it has to read, at the bandwidth of a large copy.
"""

import functools
import gc
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import SkipTest

import torch
from full_pages import fill
from transformers import AutoModelForCausalLM, Qwen3Config, StaticCache

from gpu.clock import bandwidth, graph_of, milliseconds
from gpu.sections import Bench, Case, ops_take
from kvpop_vllm.evaluation.policies import learned, training_free
from kvpop_vllm.evaluation.runner import Setting, evaluate, resolve_all
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.model_hook import CACHE_NAME, load_model, show_hidden_states
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.testing import random_prompt, write_random_scorer, write_tiny_model

QWEN3_8B = Qwen3Config(
    num_hidden_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=1 << 18,
    tie_word_embeddings=False,
)
CONTEXTS = 16384, 131072, 65536, 32768
"""Contexts; the shortest and the longest come first, in case time runs out."""
COMPRESSION, FIXED = 4, 4096
"""Tokens per retained token, and a budget that does not grow."""
SINKS, WINDOW = 4, 256
NO_MASK = {"attention_mask": {"full_attention": None}}
ROOM = 4 << 30
"""Bytes that must be free in addition to a cache."""
GIB = 1 << 30
PROMPTS, NEW = (40, 33), 40
"""Prompts of the tiny model and new tokens; replays reach its B of 64, in one row before the other."""
SMALL_PROMPTS, SMALL_NEW = (10, 9), 5
"""Prompts and new tokens with interpreted kernels, for B of 12."""


class Drawn(NamedTuple):
    """Random model on the bench's device, and the folder of a scorer for it."""

    model: torch.nn.Module
    scorer: Path


def cases(bench: Bench) -> Iterator[Case]:
    """Yield the cases of the section."""
    right = "a captured pass is right, {}".format
    yield Case(right("kvpop"), kvpop_right)
    yield Case(right("dense"), dense_right)
    yield Case("a row of kvpop eval is right", evaluation_right)
    yield Case("vLLM serves", served, ())
    with tempfile.TemporaryDirectory() as folder:
        drawn = functools.cache(partial(qwen3, bench, Path(folder)))
        for requests, context in (*((1, length) for length in CONTEXTS), (32, CONTEXTS[0])):
            run, batch = (
                partial(times, drawn=drawn, requests=requests, context=context),
                f"batch {requests}, context {context}",
            )
            yield Case(f"generation, {batch}, dense", run, (right("dense"),))
            for budget in sorted({context // COMPRESSION, FIXED}):
                name = f"generation, {batch}, kvpop, B {budget}"
                yield Case(name, partial(run, budget=budget), (right("kvpop"),))


# Models


def qwen3(bench: Bench, folder: Path) -> Drawn:
    """Return a model of Qwen3-8B's shape, whose configuration and scorer are written to a folder."""
    QWEN3_8B.save_pretrained(folder)
    scorer = write_random_scorer(folder / "scorer", folder, sinks=SINKS, window=WINDOW, topk=64)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(QWEN3_8B, dtype=bench.dtype, attn_implementation="sdpa")
    return Drawn(model.eval().requires_grad_(False), scorer)


@contextmanager
def tiny(bench: Bench) -> Iterator[Drawn]:
    """Yield a tiny model whose tokens depend on distant ones."""
    shape, roles = {}, dict(sinks=4, window=16, topk=44)
    if bench.small:
        shape, roles = dict(layers=1, q_heads=2, kv_heads=1, head_dim=16), dict(sinks=1, window=3, topk=8)
    with tempfile.TemporaryDirectory() as folder:
        base = write_tiny_model(Path(folder) / "model", "qwen3", dtype=bench.dtype, **shape)
        scorer = write_random_scorer(Path(folder) / "scorer", base, **roles)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=bench.dtype, attn_implementation="sdpa")
        yield Drawn(model.to(bench.device).eval().requires_grad_(False), scorer)


@dataclass
class Decoding:
    """Repeated passes that generate one greedy token of every row.

    Attributes:
        model: the model.
        cache: its cache.
        tokens: ``[R, 1]``, tokens of the last pass.
        before: called before each pass.
        options: arguments of the model's forward.
        held: bytes of the cache.
        read: bytes that a pass reads or writes of it, and of scorers.
        check: raises AssertionError if passes have left the cache in another state than they should.
        logits: ``[R, V]`` of the last pass.
    """

    model: torch.nn.Module
    cache: object
    tokens: torch.Tensor
    before: Callable[[], object] = lambda: None
    options: dict = field(default_factory=dict)
    cache_bytes: int = 0
    read: int = 0
    check: Callable[[], object] = lambda: None
    logits: torch.Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        """Run one pass."""
        self.before()
        options = {CACHE_NAME: self.cache, "use_cache": True} | self.options
        self.logits = self.model(input_ids=self.tokens, **options).logits[:, -1]
        self.tokens.copy_(self.logits.argmax(-1, keepdim=True))

    def captured(self) -> Callable[[], object]:
        """Run a pass and return a function that replays it from a CUDA graph, or without a GPU runs another one."""
        if self.tokens.device.type == "cuda":
            return graph_of(self.step)
        self.step()
        return self.step


# Caches without a prefill


def dense(drawn: Drawn, requests: int, context: int) -> Decoding:
    """Return passes of a static cache of random tokens with room for one more; before each its length is reset."""
    config, weight = drawn.model.config, drawn.model.lm_head.weight
    cache = StaticCache(config=config, max_cache_len=context)
    heads = dict(num_heads=config.num_key_value_heads, head_dim=config.head_dim)
    cache.early_initialization(batch_size=requests, dtype=weight.dtype, device=weight.device, **heads)
    lengths = torch.zeros(len(cache.layers), dtype=torch.int64, device=weight.device)
    for layer, count in zip(cache.layers, lengths, strict=True):
        assert layer.cumulative_length.ndim == 0, "this transformers keeps the length of a static cache elsewhere"
        layer.cumulative_length = count
        layer.keys.normal_()
        layer.values.normal_()
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    first = torch.zeros(requests, 1, dtype=torch.int64, device=weight.device)
    return Decoding(drawn.model, cache, first, lambda: lengths.fill_(context - 1), NO_MASK, size, size)


@torch.no_grad()
def kvpop(drawn: Drawn, requests: int, context: int, budget: int) -> Decoding:
    """Return passes of a KVpop cache of random tokens, which read its tokens, and read and write its states."""
    cache = KVpopCache(drawn.model, "kvpop", scorer=drawn.scorer, budget=budget, max_length=2 * context)
    first = torch.zeros(requests, 1, dtype=torch.int64, device=drawn.model.lm_head.weight.device)
    drawn.model(input_ids=first, cache=cache)
    (clock,), layers = cache._lengths_by_device.values(), list(cache._layers.values())
    with torch.device(first.device):
        for layer in layers:
            fill(layer.pages, layer.table, layer.rule, budget, context)
    clock.positions.fill_(context)

    def check():
        cache.replayed(int(clock.positions[0]) - cache.lengths[0])
        for index in {0, len(cache) - 1}:
            counts = layers[index].held(0, cache.lengths[0], 0).sum(1).tolist()
            assert set(counts) == {budget}, f"layer {index} holds {counts} tokens, not {budget}"

    check()
    layout, rule = layers[0].pages.layout, layers[0].rule
    head = budget * layout.slot_bytes + 8 * rule.state_floats(layout.head_size)
    weights = (weight for layer in layers for weight in vars(layer.rule.scorer).values())
    scorers = sum(weight.nbytes for weight in weights if isinstance(weight, torch.Tensor))
    read = requests * layout.num_kv_heads * len(cache) * head + scorers
    return Decoding(drawn.model, cache, first, cache_bytes=cache.allocated_bytes(), read=read, check=check)


# Checks


def kvpop_right(bench: Bench) -> Iterator[dict]:
    """Check that captured passes give the tokens of single passes, and retain the same tokens.

    The caches fill up during replays, one row's after the other's. Interpreted passes are compared with those of
    a CPU's kernels.
    """
    lengths, new = (SMALL_PROMPTS, SMALL_NEW) if bench.small else (PROMPTS, NEW)
    with tiny(bench) as drawn:
        plain, cache = (KVpopCache(drawn.model, "kvpop", scorer=drawn.scorer) for _ in range(2))
        expected = greedy(bench, drawn.model, plain, lengths, new, Decoding.step)
        with ops_take("triton" if bench.small else None) as calls:
            tokens = greedy(bench, drawn.model, cache, lengths, new, Decoding.captured)
        slow = "reference" in {implementation for _, implementation in calls}
        assert {op for op, _ in calls} == {"prefill_chunk", "decode_step"} and not slow, f"kernels: {sorted(calls)}"
        if bench.device == "cuda":  # without a graph, passes are counted already
            cache.replayed(new - 2)
    assert tokens == expected, f"captured passes give {tokens}, single ones {expected}"
    assert all(torch.equal(cache.held(row), plain.held(row)) for row in range(2)), "other tokens are held"
    yield bench.row("tokens that differ", 0, "count")


def greedy(bench: Bench, model, cache, lengths: tuple[int, ...], new: int, first_pass) -> list[list[int]]:
    """Return ``new`` greedy tokens of every row after random prompts, the shorter ones padded on their left.

    The first comes from the prompt's pass, the second from a pass, the others from repetitions of it.

    Args:
        bench: device and dtype.
        model: the model.
        cache: its empty cache.
        lengths: tokens of each prompt.
        new: number of tokens.
        first_pass: method of :class:`Decoding` that runs a pass, and may return a function that repeats it.
    """
    longest = max(lengths)
    rows = [[0] * (longest - n) + random_prompt(n, seed=i) for i, n in enumerate(lengths)]
    mask = [[0] * (longest - n) + [1] * n for n in lengths]
    rows, mask = (torch.tensor(x, device=bench.device) for x in (rows, mask))
    with torch.no_grad():
        logits = model(input_ids=rows, attention_mask=mask, **{CACHE_NAME: cache}, logits_to_keep=1).logits
    decoding = Decoding(model, cache, logits[:, -1:].argmax(-1))
    tokens = [decoding.tokens.clone()]
    repeat = first_pass(decoding) or decoding.step
    for _ in range(new - 2):
        tokens.append(decoding.tokens.clone())
        repeat()
    return torch.cat([*tokens, decoding.tokens], 1).tolist()


def dense_right(bench: Bench) -> Iterator[dict]:
    """Check that a captured pass of a full cache gives the logits of a single pass that has a mask."""
    with tiny(bench) as drawn:
        plain = dense(drawn, 2, max(PROMPTS))
        masked = replace(plain, tokens=plain.tokens.clone(), options={})
        masked.step()
        replay = plain.captured()
        plain.tokens.zero_()
        replay()
        error = float((plain.logits - masked.logits).abs().max())
    assert error < (0.2 if bench.dtype == torch.bfloat16 else 1e-3), f"without a mask logits differ by {error:.3g}"
    yield bench.row("largest difference of logits", error, "absolute")


def evaluation_right(bench: Bench) -> Iterator[dict]:
    """Check that the measures of a row of random tokens are those of the CPU's kernels, and that no policy runs there.

    Rounding of the weights changes them by 3e-7. `kvpop` and `h2o` differ by a hundredth.
    """
    setting = Setting(40, 12, None, None) if bench.small else Setting(400, 64, None, None)
    with tiny(bench) as drawn:
        shape = ModelShape.of(drawn.model.name_or_path, setting.length)
        scorer, _ = learned(str(drawn.scorer), drawn.model.name_or_path)
        policies = scorer, training_free("h2o")
        row, measured, implementations = torch.tensor(random_prompt(setting.length)), [], []
        for device, forced in (("cpu", None), (bench.device, "triton" if bench.small else None)):
            model = load_model(drawn.model.name_or_path, torch.float32).to(device)
            show_hidden_states(model)
            runs = resolve_all([(policy, setting) for policy in policies], shape, torch.float32)
            with ops_take(forced) as calls:
                measured.append(list(evaluate(model, [row], [setting.length], runs)))
            implementations.append({used for op, used in calls if op == "prefill_chunk"})
    assert implementations[1] == {"triton"}, f"kernels: {implementations}"
    for name, expected, record in zip(("dense", "kvpop", "h2o"), *measured, strict=True):
        common = [measure for measure in ("nll", "kl", "error", "mass", "teacher", "hindsight") if measure in expected]
        difference = max(abs(record[measure] / expected[measure] - 1) for measure in common)
        assert difference < 1e-3, f"{name}: {record}, not {expected}"
        yield bench.row(f"{name}, largest difference of measures", difference, "relative") | {"dtype": "float32"}


def served(bench: Bench) -> Iterator[dict]:
    """Check that vLLM, where it is installed, generates under a policy, and compare its tokens with those of `KVpopCache`.

    Raises:
        SkipTest: there is no vLLM.
    """
    if importlib.util.find_spec("vllm") is None or bench.small:
        raise SkipTest("vLLM is not on this machine" if not bench.small else "vLLM is not interpreted")
    from vllm import LLM, SamplingParams

    with tiny(bench) as drawn, tempfile.TemporaryDirectory() as folder:
        drawn.model.save_pretrained(folder)
        policy = {"policy": "kvpop", "scorer": str(drawn.scorer)}
        llm = LLM(folder, skip_tokenizer_init=True, max_model_len=256, additional_config={"kv_policy": policy})
        prompts = [{"prompt_token_ids": random_prompt(n, seed=i)} for i, n in enumerate(PROMPTS)]
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        )
        served_tokens = [list(output.outputs[0].token_ids) for output in outputs]
        cached_tokens = greedy(
            bench, drawn.model, KVpopCache(drawn.model, "kvpop", scorer=drawn.scorer), PROMPTS, NEW, Decoding.step
        )
    assert [len(tokens) for tokens in served_tokens] == [NEW, NEW], (
        f"{[len(tokens) for tokens in served_tokens]} tokens were generated"
    )
    equal = [
        a == b
        for row, cached in zip(served_tokens, cached_tokens, strict=True)
        for a, b in zip(row, cached, strict=True)
    ]
    yield bench.row("tokens of KVpopCache's", sum(equal) / len(equal), "share")


# Times


def times(
    bench: Bench, drawn: Callable[[], Drawn], requests: int, context: int, budget: int | None = None
) -> Iterator[dict]:
    """Yield rows of a pass.

    Args:
        bench: device and dtype.
        drawn: returns the model.
        requests: rows of a batch.
        context: tokens that have been seen.
        budget: B, or None for the static cache.

    Raises:
        SkipTest: the cache does not fit.
        AssertionError: the cache is wrong before its passes.
    """
    model, shape = drawn().model, QWEN3_8B
    gc.collect()
    torch.cuda.empty_cache()
    slot = shape.num_hidden_layers * shape.num_key_value_heads * 2 * shape.head_dim * bench.dtype.itemsize
    needed, free = ROOM + requests * (budget or context) * slot, torch.cuda.mem_get_info()[0]
    if free < needed:
        raise SkipTest(f"it needs {needed / GIB:.1f} GiB and {free / GIB:.1f} are free")
    place = drawn(), requests, context
    decoding = kvpop(*place, budget) if budget else dense(*place)
    torch.cuda.reset_peak_memory_stats()
    replay = decoding.captured()
    peak, time = torch.cuda.max_memory_allocated(), milliseconds(replay)
    try:
        decoding.check()
    except AssertionError as error:
        bench.check(False, str(error))
    bench.check(bool(decoding.logits.isfinite().all()), "logits are not finite")
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    yield bench.row("a token", time, "ms", (weights + decoding.read) / bandwidth())
    yield bench.row("tokens a second", 1e3 * requests / time, "1/s")
    yield bench.row("cache", decoding.cache_bytes / GIB, "GiB")
    yield bench.row("peak memory while decoding", peak / GIB, "GiB")
