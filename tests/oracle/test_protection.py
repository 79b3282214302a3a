"""The oracle of protected prompts, checked from first principles."""

from dataclasses import replace

import pytest
import torch

from kvpop_vllm.testing import OraclePolicy, raw_scores, read_scorer, write_random_scorer

LENGTH, SHAPE = 90, {"sinks": 3, "window": 6, "topk": 12}


@pytest.fixture(params=["recency", "key norm", "newest mass", "mean mass", "moment residual", "mlstm", "linear"])
def policy(request, model, tmp_path):
    if request.param in ("mlstm", "linear"):
        return OraclePolicy.from_scorer(write_random_scorer(tmp_path, model, request.param, **SHAPE))
    return OraclePolicy(request.param, **SHAPE)


def random_qkv():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(h, LENGTH, 32, generator=draw, dtype=torch.float64) for h in (4, 2, 2)]


@pytest.mark.parametrize("protect", [1, 3, 8, 40, 89, 90])
def test_protected_tokens_stay_and_window_and_k_are_what_they_were(policy, protect):
    visible = replace(policy, protect=protect).decide(0, *random_qkv()).visible
    for q in range(LENGTH):
        unprotected = visible[:, q, protect : q + 1]
        assert visible[:, q, : min(protect, q + 1)].all() and not visible[:, q, q + 1 :].any()
        assert unprotected[:, -6:].all() and (unprotected.sum(-1) == min(unprotected.shape[1], 6 + 12)).all()


@pytest.mark.parametrize("protect", [0, 1, 8, 40])
def test_protected_tokens_are_so_many_sinks(policy, protect):
    """Protected tokens act like sinks if the scorer's state begins with the first token anyway."""
    protected = replace(policy, protect=protect).decide(0, *random_qkv())
    protect = protect or policy.sinks
    sinks = replace(policy, sinks=protect).decide(0, *random_qkv())
    assert torch.equal(protected.visible, sinks.visible) and torch.equal(protected.lost, sinks.lost)


@pytest.mark.parametrize("replay", [0, 1, 20, 64])
def test_a_state_begins_with_the_last_tokens_of_the_prefix(model, tmp_path, replay):
    """Tokens before the replayed ones change no score, the first replayed one does.

    The scores equal those of a sequence that begins with the replayed tokens.
    """
    scorer = read_scorer(write_random_scorer(tmp_path, model, **SHAPE))
    _, key, value = random_qkv()
    begins = 64 - replay
    scores = raw_scores(scorer, 0, key, value, 6, begins=begins)
    assert scores[:, :begins].isnan().all() and scores[:, 64 : LENGTH - 6].isfinite().all()
    later = raw_scores(scorer, 0, key[:, begins:], value[:, begins:], 6)
    remaining = later[:, : LENGTH - 6 - begins]
    torch.testing.assert_close(scores[:, begins : LENGTH - 6], remaining, rtol=0, atol=1e-12)
    for changed in {max(0, begins - 1), begins}:
        other_key = key.clone()
        other_key[:, changed] += 1.0
        same = torch.equal(raw_scores(scorer, 0, other_key, value, 6, begins=begins)[:, 66:84], scores[:, 66:84])
        assert same == (changed < begins)


def test_how_much_of_a_prompt_is_asked_for():
    policy = OraclePolicy.streaming(4, 8, 12)
    for protect_prompt, prompt, protect in ((True, 7, 7), (5, 7, 5), (9, 7, 9), (0, 7, 0), (1, 7, 1)):
        assert policy.protecting(protect_prompt, prompt).protect == protect
    assert policy.protecting(0, 7).never_evicted == 4 and policy.protecting(2, 7).never_evicted == 2
