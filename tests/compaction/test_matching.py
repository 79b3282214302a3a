"""Attention matching against full attention: exact with all keys, better than its baselines with fewer."""

import math

import pytest
import torch

from kvpop_vllm.compaction.cache_attention import attend
from kvpop_vllm.compaction.reference import Fitting, Reference
from kvpop_vllm.rules.matching import NO_WEIGHT, Matching, bounded_least_squares, fit_factors, match

HEADS, GROUP, TOKENS, DIM = 2, 3, 200, 16
SCALE = DIM**-0.5


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def keys_and_values(seed=0):
    """Return keys in clusters, as those of texts are, and values that follow them in part."""
    centres = 2 * normal(HEADS, 20, DIM, seed=seed)
    clusters = torch.randint(20, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    k = centres[:, clusters] + 0.5 * normal(HEADS, TOKENS, DIM, seed=seed + 1)
    v = k @ normal(HEADS, DIM, DIM, seed=seed + 2) / 4 + 0.5 * normal(HEADS, TOKENS, DIM, seed=seed + 3)
    return k, v, centres


def queries(centres, count, seed):
    clusters = torch.randint(20, (count,), generator=torch.Generator().manual_seed(seed))
    return centres[:, clusters] + normal(HEADS, count, DIM, seed=seed)


def attention(q, k, v, bias=None):
    """Return mass (logarithm) and output, naively and in float64."""
    logits = (q.double() @ k.double().transpose(1, 2)) * SCALE
    if bias is not None:
        logits = logits + bias.double().unsqueeze(1)
    return logits.logsumexp(-1), logits.softmax(-1) @ v.double()


@pytest.mark.parametrize("slots", [TOKENS, TOKENS + 56])
@pytest.mark.parametrize("keys", ["highest", "omp"])
def test_all_keys_are_exact(slots, keys):
    k, v, centres = keys_and_values()
    fitted = match(queries(centres, 300, 5), k, v, slots, SCALE, Matching(keys=keys))
    held_out = queries(centres, 50, 6)
    for full, compact in zip(attention(held_out, k, v), attention(held_out, *fitted), strict=True):
        torch.testing.assert_close(compact, full, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("keys", "score"), [("highest", "rms"), ("highest", "max"), ("omp", "rms")])
@pytest.mark.parametrize("slots", [32, 64])
def test_fewer_keys_beat_the_baselines(keys, score, slots):
    k, v, centres = keys_and_values()
    q, held_out = queries(centres, 1000, 5), queries(centres, 200, 6)
    mass, output = attention(held_out, k, v)
    fitted = match(q, k, v, slots, SCALE, Matching(keys=keys, score=score))
    own_mass, compact_output = attention(held_out, *fitted)
    error = (compact_output - output).norm()
    last = (attention(held_out, k[:, -slots:], v[:, -slots:])[1] - output).norm()
    best = attention(q, k, v)
    weights = ((q @ k.transpose(1, 2)) * SCALE).softmax(-1)
    top = weights.square().mean(1).topk(slots).indices.unsqueeze(-1).expand(-1, -1, DIM)
    plain_mass, plain = attention(held_out, k.gather(1, top), v.gather(1, top))
    assert best[1].isfinite().all()
    assert error < 0.8 * (plain - output).norm() and error < 0.5 * last
    assert (own_mass - mass).square().mean() < 0.5 * (plain_mass - mass).square().mean()


def test_large_logits_stay_finite():
    k, v, centres = keys_and_values()
    fitted = match(60 * queries(centres, 300, 5), 60 * k, v, 32, SCALE, Matching())
    assert all(tensor.isfinite().all() for tensor in fitted)


def test_least_squares_is_optimal():
    """The gradient is 0 where a factor is between its bounds, and points outwards at a bound."""
    masses = normal(3, 400, 40, seed=1).abs() ** 3
    gram, target = masses.transpose(1, 2) @ masses, masses.sum(1)
    x = bounded_least_squares(gram, target, torch.ones(3, 40), 0.0, 0.02, 5000, tolerance=1e-7)
    gradient = (gram @ x.unsqueeze(-1)).squeeze(-1) - target
    low, high = x <= 1e-9, x >= 0.02 - 1e-7
    assert low.any() and high.any() and not (low | high).all()
    enough = 1e-3 * target.abs().max()
    assert (gradient[low] > -enough).all() and (gradient[high] < enough).all()
    assert gradient[~(low | high)].abs().max() < enough


def test_factors_keep_to_their_bounds():
    masses = normal(2, 100, 30).abs() / 1000
    factors = fit_factors(masses, Matching(most_bias=2.0))
    assert (factors <= math.exp(2) * 1.0001).all() and (factors >= math.exp(-2) * 0.9999).all()


def fitting(budgets, chunks, slots=None, **options):
    """Return one layer's fit on random reference tokens, and what was fitted."""
    k, v, centres = keys_and_values()
    q = queries(centres, 120 * GROUP, 5).view(1, HEADS * GROUP, 120, DIM)
    reference = Reference([[0] * 70, [0] * 50], [10, 0], [None, None])
    chunk_kv = normal(1, HEADS, 120, DIM, seed=8), normal(1, HEADS, 120, DIM, seed=9)
    fit = Fitting([(k, v)], reference, torch.tensor([budgets]), chunks, Matching(), slots=slots, **options)
    return fit, fit(0, q, *chunk_kv, SCALE), (q, *chunk_kv, k, v)


def test_padded_heads_have_no_weight():
    fit, _, (q, *_) = fitting([24, 57], [(0, TOKENS)], slots=64)
    k, v, bias = fit.layers[0]
    assert k.shape == v.shape == (HEADS, 64, DIM) and bias.shape == (HEADS, 64)
    for head, head_slots in enumerate((24, 57)):
        assert (bias[head, head_slots:] == NO_WEIGHT).all() and (bias[head, :head_slots].abs() <= 3.0001).all()
        assert not v[head, head_slots:].any() and not k[head, head_slots:].any()
    by_head = q[0].view(HEADS, -1, DIM)
    padded = attention(by_head[:1], k[:1], v[:1], bias[:1])
    cut = attention(by_head[:1], k[:1, :24], v[:1, :24], bias[:1, :24])
    torch.testing.assert_close(padded[1], cut[1], rtol=0, atol=1e-12)


def test_chunks_have_their_share_of_slots():
    fit, _, (*_, k, _) = fitting([64, 32], [(0, 50), (50, 150), (150, 200)])
    compact = fit.layers[0][0]
    for head, slots in enumerate((64, 32)):
        rows = (compact[head, :slots].unsqueeze(1) == k[head].unsqueeze(0)).all(-1)
        tokens = rows.float().argmax(-1)
        assert rows.any(-1).all() and (tokens.diff() > 0).all()
        inside = [int(((tokens >= a) & (tokens < b)).sum()) for a, b in ((0, 50), (50, 150), (150, 200))]
        assert inside == [slots / 4, slots / 2, slots / 4]


@pytest.mark.parametrize("on_policy", [True, False])
def test_reference_tokens_see_the_cache_and_their_sequence(on_policy):
    fit, out, (q, own_k, own_v, k, v) = fitting([64, 64], [(0, TOKENS)], on_policy=on_policy)
    cache = fit.layers[0] if on_policy else (k, v, torch.zeros(HEADS, TOKENS))
    for row, start in ((0, 0), (69, 0), (70, 70), (119, 70)):
        keys = torch.cat([cache[0], own_k[0, :, start : row + 1]], 1)
        values = torch.cat([cache[1], own_v[0, :, start : row + 1]], 1)
        bias = torch.cat([cache[2], torch.zeros(HEADS, row + 1 - start)], 1)
        expected = attention(q[0].view(HEADS, GROUP, 120, DIM)[:, :, row], keys, values, bias)[1]
        torch.testing.assert_close(out[0].view(HEADS, GROUP, 120, DIM)[:, :, row].double(), expected, atol=1e-5, rtol=0)


def test_attention_without_bias():
    k, v, _ = keys_and_values()
    q, chunk = normal(1, HEADS * GROUP, 9, DIM), normal(1, HEADS, 9, DIM, seed=3)
    zeros = torch.zeros(HEADS, TOKENS)
    torch.testing.assert_close(attend(q, chunk, chunk, SCALE, k, v, None), attend(q, chunk, chunk, SCALE, k, v, zeros))
