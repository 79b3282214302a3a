"""An identity of each training-free policy, from its paper or definition, in reference and C++ kernels."""

import pytest
import torch
from policies.matrix import force, made

from kvpop_vllm import policies
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.policies.base import Signal

HEADS, GROUP, SIZE, LENGTH = 2, 3, 32, 120
SCALE = SIZE**-0.5
TRAINING_FREE = ["streaming-llm", "l2norm", "h2o", "tova", "momentkv"]


@pytest.fixture(params=["reference", "cpp"])
def impl(request):
    return request.param


def tokens(seed=0):
    """Return q ``[L, Hq, D]`` and k, v ``[L, H, D]``."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(LENGTH, n, SIZE, generator=draw) for n in (HEADS * GROUP, HEADS, HEADS)]


def serve(name, q, k, v, impl, budget=40, **settings):
    """Return the outputs ``[L, Hq, D]`` of a prompt and the positions that each head holds at its end."""
    policy = made(name, budget, ModelShape("llama", 1, HEADS, SIZE, LENGTH), **settings)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    rows = LayerRows(policy.layer_rule(0, slice(0, HEADS)), budget, k[None], SCALE)
    with pytest.MonkeyPatch.context() as patch:
        force(patch, impl)
        out = rows.append(q[None], k[None], v[None])[0].transpose(0, 1)
    return out, [head.nonzero().flatten().tolist() for head in rows.held_by_rows()[0]]


def dense(q, k, v):
    """Return the outputs of causal attention in float64."""
    k, v = (x.double().repeat_interleave(GROUP, 1).transpose(0, 1) for x in (k, v))
    logits = q.double().transpose(0, 1) @ k.transpose(1, 2) * SCALE
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return (logits.masked_fill(~causal, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("correction", ["none", "moment"])
@pytest.mark.parametrize("name", TRAINING_FREE)
def test_a_budget_of_the_whole_sequence_is_dense(name, correction, impl):
    q, k, v = tokens()
    out, retained = serve(name, q, k, v, impl, budget=LENGTH, correction=correction)
    torch.testing.assert_close(out.double(), dense(q, k, v), rtol=0, atol=1e-5)
    assert retained == [list(range(LENGTH))] * HEADS


@pytest.mark.parametrize("name", ["momentkv", "streaming-llm", "tova", "h2o", "l2norm"])
def test_identical_evicted_keys_are_corrected_exactly(name, impl):
    """The corrected output equals the dense one if all evicted keys are identical.

    Covariance and Jensen's gap are then 0, whatever the values (MomentKV, appendix B). Without the correction
    the output differs.
    """
    q, k, v = tokens()
    k[:] = k[7]
    exact = dense(q, k, v)
    corrected, _ = serve(name, q, k, v, impl, correction="moment")
    torch.testing.assert_close(corrected.double(), exact, rtol=0, atol=1e-5)
    plain, _ = serve(name, q, k, v, impl, correction="none")
    assert (plain.double() - exact).abs()[60:].mean() > 0.05


def test_the_correction_follows_the_query(impl):
    """The error of the correction falls with the square of the spread of the evicted keys.

    For a small spread the correction is exact to first order (MomentKV, eq. 9).
    """
    q, k, v = tokens()
    errors = []
    for spread in (0.04, 0.02, 0.01):
        near = k[7] + spread * (k - k[7])
        out, _ = serve("streaming-llm", q, near, v, impl, correction="moment")
        errors.append(float((out.double() - dense(q, near, v))[60:].abs().max()))
    assert errors[0] > 3 * errors[1] > 9 * errors[2] > 0


def test_tova_drops_what_the_last_query_ignores(impl):
    """The token with the least attention from the newest query is evicted, whatever it got before."""
    q, k, v = tokens()
    q[:, :], k[:] = 0, 0
    k[3, :, 0], q[:60, :, 0] = 20.0, 20.0  # sixty queries attend to token 3
    q[60:, :, 0] = -20.0
    _, retained = serve("tova", q, k, v, impl)
    assert all(3 not in head for head in retained)
    _, retained = serve("h2o", q, k, v, impl)
    assert all(3 in head for head in retained)


def test_h2o_divides_by_the_number_of_queries(impl):
    """H2O ranks tokens by their mean mass over all queries since they arrived, not by the sum.

    Token 50 leaves the window at 84. Until then it had all the attention of 22 queries, from 62 on. Token 5
    had that of 25 queries, until 29. The sum of token 5 is larger, its mean is smaller, and there is room for
    one of them.
    """
    q, k, v = tokens()
    q[:], k[:] = 0, 0
    k[5, :, 0], k[50, :, 1], q[:30, :, 0], q[62:, :, 1] = 20.0, 20.0, 40.0, 40.0
    _, retained = serve("h2o", q, k, v, impl, budget=40, sinks=5, window=34)  # room for one long-range token
    assert all(50 in head and 5 not in head for head in retained)
    q[62:, :, 1] = 0
    _, retained = serve("h2o", q, k, v, impl, budget=40, sinks=5, window=34)
    assert all(5 in head and 50 not in head for head in retained)


@pytest.mark.parametrize("name", [name for name in policies.POLICIES if Signal.MASS in policies.get(name).signals])
def test_heads_that_ranks_share_need_all_their_queries(name):
    """Copies of a KV head on two ranks would evict by the attention of other query heads."""
    policy = made(name, 128)
    heads = policy.model.num_kv_heads
    if name != "adakv":  # one rank
        policy.check_ranks(heads)
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        policy.check_ranks(2 * heads)
