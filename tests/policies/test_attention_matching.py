"""Slots that are made of a prompt at its end equal those of a naive fit in float64, and so does attention to them."""

import functools

import numpy as np
import pytest
import torch
from policies.matrix import made

from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.testing import oracle_matching

pytestmark = pytest.mark.usefixtures("few_threads")

HEADS, GROUP, SIZE, BUDGET, WINDOW, MORE = 2, 2, 16, 40, 12, 50
SCALE = SIZE**-0.5
PROMPTS = [1, WINDOW - 1, WINDOW, WINDOW + 1, BUDGET - 1, BUDGET, BUDGET + 1, 70, 110]
MODEL = ModelShape("llama", 2, HEADS, SIZE, 1024, num_heads=HEADS * GROUP)


def policy(**settings):
    return made("attention-matching", BUDGET, MODEL, window=WINDOW, **settings)


@functools.cache
def tokens(prompt: int, seed: int = 0):
    """Return q, k, v ``[heads, S, D]`` with keys in clusters, as those of texts are."""
    draw = torch.Generator().manual_seed(100 * seed + prompt)
    length = prompt + MORE
    centres = 2 * torch.randn(HEADS, 8, SIZE, generator=draw)
    cluster = torch.randint(8, (length,), generator=draw)
    k = centres[:, cluster] + 0.5 * torch.randn(HEADS, length, SIZE, generator=draw)
    q = centres.repeat_interleave(GROUP, 0)[:, cluster.flip(0)] + torch.randn(
        HEADS * GROUP, length, SIZE, generator=draw
    )
    return q, k, torch.randn(HEADS, length, SIZE, generator=draw)


def run(prompt: int, counts, policy=policy, impl: str = "auto", rows: int = 1, sinks: torch.Tensor | None = None):
    """Feed a prompt and later tokens in pieces; return the layer and its outputs ``[R, Hq, S, D]``.

    ``sinks [Hq]`` are logits of attention sinks, or None.
    """
    q, k, v = (
        torch.stack([x, *(tokens(prompt, i + 1)[n] for i in range(rows - 1))]) for n, x in enumerate(tokens(prompt))
    )
    layer = LayerRows(policy().rule(0, slice(0, HEADS)), BUDGET, k, SCALE, protected=prompt)
    layer.attention.impl = impl
    outs = [layer.append(*qkv, sink_logits=sinks) for qkv in zip(*(x.split(counts, 2) for x in (q, k, v)), strict=True)]
    return layer, torch.cat(outs, 2)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_made_slots_are_the_oracles(prompt):
    """Tokens and values are those of a naive fit, biases fit as well; a prompt that fits is kept to the bit."""
    layer, _ = run(prompt, [prompt, MORE])
    count, near = oracle_matching.sizes(prompt, BUDGET, WINDOW)
    (keys, values, biases), kv = layer.made_slots(0), tokens(prompt)
    best, fitted = (oracle_matching.made_slots(*kv, prompt, BUDGET, WINDOW, fixed) for fixed in (None, biases))
    for h in range(HEADS):
        assert best[h].margin > 1e-4 and torch.equal(keys[h], kv[1][h, best[h].tokens])
        np.testing.assert_allclose(values[h].numpy(), fitted[h].values, rtol=0, atol=1e-4)
        assert fitted[h].misfit <= best[h].misfit + 1e-4 and (biases[h].abs() < 3.0001).all()
        if prompt <= BUDGET:
            assert not biases[h].any() and torch.equal(values[h], kv[2][h, : prompt - near])
        else:
            assert biases[h].any() and not torch.equal(values[h], kv[2][h, best[h].tokens])


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_outputs_are_the_oracles(prompt, impl):
    """Decode steps and later chunks attend to the made slots and to the newest tokens, in one order or another."""
    if impl == "cpp" and dispatch.select("decode_step", torch.empty(0, SIZE)) != "cpp":
        pytest.skip("kvpop_vllm._C is not built")
    count, _ = oracle_matching.sizes(prompt, BUDGET, WINDOW)
    for counts in ([prompt, *[1] * MORE], [prompt, 9, *[1] * 7, 20, *[1] * (MORE - 36)], [prompt + MORE]):
        layer, out = run(prompt, counts, impl=impl)
        slots_of_heads = oracle_matching.made_slots(*tokens(prompt), prompt, BUDGET, WINDOW, layer.made_slots(0)[2])
        expected = oracle_matching.outputs(*tokens(prompt), slots_of_heads, prompt, BUDGET, WINDOW)
        torch.testing.assert_close(out[0].double(), expected, rtol=0, atol=1e-4)
        retained = layer.held_by_rows()[0]
        assert (retained.sum(-1) == min(BUDGET, prompt + MORE)).all(), "no head holds more than B, or less than it may"
        newest = [t for t in range(prompt + MORE) if t >= max(prompt - WINDOW, prompt + MORE - (BUDGET - count))]
        for h, slots in enumerate(slots_of_heads):
            assert retained[h].nonzero().flatten().tolist() == sorted({*slots.tokens.tolist(), *newest})


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("prompt", [WINDOW, BUDGET + 1, 110])
def test_attention_sinks(prompt, impl):
    """Slots are fitted to masses that leave the sinks' share out, and outputs have the sinks in their softmax."""
    if impl == "cpp" and dispatch.select("decode_step", torch.empty(0, SIZE)) != "cpp":
        pytest.skip("kvpop_vllm._C is not built")
    sinks, biases_of = torch.tensor([18.0, 14.0, 22.0, 16.0]), []
    for logits in (sinks, None):
        layer, out = run(prompt, [prompt, 9, *[1] * (MORE - 9)], impl=impl, sinks=logits)
        (keys, values, biases), kv = layer.made_slots(0), tokens(prompt)
        best = oracle_matching.made_slots(*kv, prompt, BUDGET, WINDOW, None, logits)
        fitted = oracle_matching.made_slots(*kv, prompt, BUDGET, WINDOW, biases, logits)
        for h in range(HEADS):
            assert best[h].margin > 1e-4 and torch.equal(keys[h], kv[1][h, best[h].tokens])
            np.testing.assert_allclose(values[h].numpy(), fitted[h].values, rtol=0, atol=1e-4)
            assert fitted[h].misfit <= best[h].misfit + 1e-4
        expected = oracle_matching.outputs(*kv, fitted, prompt, BUDGET, WINDOW, logits)
        torch.testing.assert_close(out[0].double(), expected, rtol=0, atol=1e-4)
        biases_of.append(biases)
    assert prompt <= BUDGET or not torch.allclose(*biases_of, atol=1e-2)


@pytest.mark.parametrize("prompt", [WINDOW + 1, 110])
def test_chunks_and_rows_change_nothing(prompt):
    """A prompt in chunks, also of one token, and next to another row, leaves the same slots to the bit."""
    unchunked, expected = run(prompt, [prompt, *[1] * MORE])
    count, _ = oracle_matching.sizes(prompt, BUDGET, WINDOW)
    for counts, rows in (([*[7] * (prompt // 7), *[1] * (prompt % 7)], 1), ([*[1] * prompt], 1), ([prompt], 2)):
        layer, out = run(prompt, [*counts, *[1] * MORE], rows=rows)
        for mine, theirs in zip(layer.made_slots(0), unchunked.made_slots(0), strict=True):
            assert torch.equal(mine, theirs)
        torch.testing.assert_close(out[:1], expected, rtol=0, atol=1e-5)


def test_sizes_follow_from_the_budget():
    """A quarter of B is the window unless it is given, and as many of the last queries are kept, at most 256."""
    for budget, window in ((2, 1), (40, 10), (1024, 256), (4096, 1024)):
        default = made("attention-matching", budget, MODEL)
        assert default.retention.window == window and default.compression.queries == min(256, window)
    assert made("attention-matching", 64, MODEL, max_budget=512).compression.queries == 128
    assert policy().retention_of(64).window == WINDOW
