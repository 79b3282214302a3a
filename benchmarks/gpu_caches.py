"""Random models and their caches after a long context, made without a prefill, and graphs of a pass."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gpu import Bench
from gpu_clock import graph_of
from transformers import AutoModelForCausalLM, Qwen3Config, StaticCache

from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

_NAMES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
QWEN3_8B = dict(zip(_NAMES, (36, 4096, 12288, 32, 8, 128, 151936), strict=True))
TINY = dict(zip(_NAMES, (2, 64, 96, 4, 2, 32, 256), strict=True))
TINIER = dict(zip(_NAMES, (1, 64, 96, 2, 1, 16, 256), strict=True))
"""Shape for interpreted kernels."""
POSITIONS = 1 << 18
"""Positions of a random model, more than any context."""
SINKS, WINDOW = 4, 256


class Drawn:
    """Model with random weights, made at first use, and a folder with scorers for it; a context manager.

    Attributes:
        config: config of the model.
        scorer: folder of the scorers.
    """

    def __init__(self, bench: Bench, shape: dict, window: int = WINDOW):
        self.config = Qwen3Config(**shape, max_position_embeddings=POSITIONS, tie_word_embeddings=False)
        self.bench, self.window, self._model = bench, window, None

    def __enter__(self) -> Drawn:
        self._folder = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._folder.cleanup()
        self._model = None
        empty(self.bench)

    @property
    def model(self) -> torch.nn.Module:
        """Model on the bench's device; the first access makes it."""
        if self._model is None:
            self.config.save_pretrained(self._folder.name)
            self.scorer = write_random_scorer(
                Path(self._folder.name) / "scorer", self._folder.name, sinks=SINKS, window=self.window, topk=64
            )
            with torch.device(self.bench.device):
                model = AutoModelForCausalLM.from_config(
                    self.config, dtype=self.bench.dtype, attn_implementation="sdpa"
                )
            self._model = model.eval().requires_grad_(False)
        return self._model

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return sum(p.nbytes for p in self.model.parameters())

    @property
    def read(self) -> int:
        """Bytes of the weights that a pass reads, which exclude the input embeddings."""
        return self.weights - self.model.get_input_embeddings().weight.nbytes


# One pass


class Decoding:
    """Repeated passes that generate one greedy token of every row.

    Args:
        model: the model.
        cache: its cache.
        tokens: ``[R, 1]``, the first tokens.
        before: called before each pass.
        options: arguments of the model's forward.

    Attributes:
        tokens: ``[R, 1]``, tokens of the last pass.
        logits: ``[R, V]`` of the last pass.
    """

    def __init__(self, model, cache, tokens: torch.Tensor, before: Callable[[], object] = lambda: None, **options):
        self.model, self.tokens, self.before = model, tokens.clone(), before
        self.options = dict(past_key_values=cache, use_cache=True, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Run one pass."""
        self.before()
        self.logits = self.model(input_ids=self.tokens, **self.options).logits[:, -1]
        self.tokens.copy_(self.logits.argmax(-1, keepdim=True))

    def captured(self, bench: Bench) -> Callable[[], object]:
        """Run a pass and return a function that runs another one.

        The function replays a CUDA graph; without a GPU it is the pass itself.
        """
        if bench.device != "cuda":
            self.step()
            return self.step
        return graph_of(self.step).replay


# Caches without a prefill


def static_cache(model, requests: int, length: int) -> tuple[StaticCache, torch.Tensor]:
    """Return an empty static cache, and the number of tokens that its layers have seen, ``[layers]``."""
    config, weight = model.config, model.lm_head.weight
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(
        batch_size=requests,
        num_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )
    seen = torch.zeros(len(cache.layers), dtype=torch.int64, device=weight.device)
    for layer, count in zip(cache.layers, seen, strict=True):
        assert layer.cumulative_length.ndim == 0, "this transformers keeps the length of a static cache elsewhere"
        layer.cumulative_length = count
    return cache, seen


def full_cache(model, requests: int, context: int) -> tuple[StaticCache, Callable[[], object]]:
    """Return a static cache of random tokens with room for one more, and a function that resets its length.

    The tokens are the same in every call. The length must be reset after every token.
    """
    cache, seen = static_cache(model, requests, context)
    generator = torch.Generator(seen.device).manual_seed(0)
    for layer in cache.layers:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    return cache, lambda: seen.fill_(context - 1)


@torch.no_grad()
def written_cache(drawn: Drawn, requests: int, context: int, budget: int) -> KVpopCache:
    """Return a cache that holds random tokens as after ``context`` tokens."""
    model = drawn.model
    cache = KVpopCache(model, "kvpop", scorer=drawn.scorer, budget=budget, max_length=2 * context)
    first = torch.zeros(requests, 1, dtype=torch.int64, device=model.lm_head.weight.device)
    model(input_ids=first, past_key_values=cache)
    generator = torch.Generator(first.device).manual_seed(0)
    for layer in cache._layers.values():
        write(layer, context, generator)
    for lengths in cache._lengths_by_device.values():
        lengths.positions.fill_(context)
    cache.replayed(context - cache.lengths[0])
    check_held(cache, budget)
    return cache


def write(layer, context: int, generator: torch.Generator) -> None:
    """Fill a layer's pages with random tokens; the scorer's state is unchanged."""
    pages, rule, (budget,) = layer.pages, layer.rule, layer.budgets.unique().tolist()
    layout, device = pages.layout, pages.raw.device
    rows = layer.table[:, 0].long()  # [R, P]
    states, blocks = rows[:, : layout.state_blocks], rows[:, layout.state_blocks :]
    kept = pages.state[states]
    for part in (pages.k, pages.v, pages.score):
        part.normal_(generator=generator)
    pages.state[states] = kept
    words = torch.zeros(blocks.shape[1] * layout.block_slots, dtype=torch.int32, device=device)
    before = context - rule.window - rule.sinks
    left = torch.randperm(before, device=device, generator=generator)[: budget - rule.first_long]
    words[rule.first_long : budget] = rule.sinks + left.int()
    words[0] = context
    pages.position[blocks] = words.view(1, -1, 1, layout.block_slots).expand(len(rows), -1, layout.num_kv_heads, -1)


def check_held(cache: KVpopCache, budget: int) -> None:
    """Check that the cache's reader finds ``budget`` tokens in the first and last layer.

    Raises:
        AssertionError: it finds another number.
        ValueError: the pages have not seen as many tokens.
    """
    for index in {0, len(cache) - 1}:
        held = cache._layers[index].held(0, cache.lengths[0], cache.protected[0])
        assert bool((held.sum(1) == budget).all()), f"layer {index} holds {held.sum(1).tolist()} tokens, not {budget}"


@contextmanager
def tiny(bench: Bench) -> Iterator[tuple[torch.nn.Module, Path, int]]:
    """Yield a tiny model whose tokens depend on distant ones, the folder of its scorer, and B.

    The model has the bench's device and dtype.
    """
    shape, roles = (
        ({}, (4, 16, 44)) if not bench.small else (dict(layers=1, q_heads=2, kv_heads=1, head_dim=16), (1, 3, 8))
    )
    with tempfile.TemporaryDirectory() as folder:
        base = write_tiny_model(Path(folder) / "model", "qwen3", dtype=bench.dtype, **shape)
        sinks, window, topk = roles
        scorer = write_random_scorer(Path(folder) / "scorer", base, sinks=sinks, window=window, topk=topk)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=bench.dtype, attn_implementation="sdpa")
        yield model.to(bench.device).eval().requires_grad_(False), scorer, sum(roles)


def empty(bench: Bench) -> None:
    """Free unused memory."""
    gc.collect()
    if bench.device == "cuda":
        torch.cuda.empty_cache()
