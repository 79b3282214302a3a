"""Rows at random first positions and windows in turn: scores, mask, loss and the written config."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from distill.rows import Rows
from distill.train_tiny import LENGTH, RECIPE

from kvpop_vllm.config import ConfigError, TrainedBudget
from kvpop_vllm.distill.sparse_attention import Sparse
from kvpop_vllm.distill.trainer import Trainer
from kvpop_vllm.model_hook import Dense, check_positions, load_model
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import parse_config
from kvpop_vllm.scorers.checkpoint import read_scorer


def train(model, out, recipe=RECIPE):
    return Trainer(model, recipe, out, Rows(recipe.length), save_every=3, quiet=True)


def test_windows_and_positions_take_turns(model, tmp_path, monkeypatch):
    """Scores, mask, loss and first position follow the row's turn; the config lists all windows.

    The first window is the scorer's own.
    """
    roles_used, begun = [], []
    plain = Sparse.__init__

    def watched(self, score, roles, observe, topk):
        roles_used.extend((roles, observe.roles))
        plain(self, lambda *values: roles_used.append(values[3]) or score(*values), roles, observe, topk)

    monkeypatch.setattr(Sparse, "__init__", watched)
    recipe = dataclasses.replace(RECIPE, window=[8, 12, 5], topk=[20, 9, 10], steps=2, positions=900)
    run = train(model, tmp_path, recipe)
    run.student.base.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: begun.append(int(kwargs["position_ids"][0, 0])), with_kwargs=True
    )
    run.run()
    turns = [(8, 20), (12, 9), (5, 10), (8, 20)]
    assert roles_used == [Retention(4 + w + k, 4, w) for w, k in turns for _ in range(4)]  # mask, loss, and two layers
    assert begun == [run.student.first_position(row) for row in (0, 1, 2, 3, 0, 1)]  # and two to fit decays on
    assert len(set(begun)) > 2
    config, _ = read_scorer(str(tmp_path))
    assert (config.window, config.topk, config.trained) == (8, 20, tuple(TrainedBudget(*t) for t in turns[:3]))
    assert parse_config(config.to_json(), "its own") == config
    assert [config.retention.window_for(slots) for slots in (1, 15, 20, 21, 27, 28, 99)] == [5, 5, 5, 12, 12, 8, 8]


def test_rows_begin_at_random_positions(model, tmp_path):
    """Scorers see keys of all positions below the bound, and nothing else about a row changes."""
    recipe = dataclasses.replace(RECIPE, positions=900, fit_decays=False)
    student = train(model, tmp_path, recipe).student
    first = [student.first_position(row) for row in range(200)]
    assert first == [student.first_position(row) for row in range(200)] and len(set(first)) > 150
    assert 0.5 < first.count(0) / len(first) * 900 / LENGTH < 2
    assert min(first) == 0 and 750 < max(first) <= 900 - LENGTH
    for change in ({"positions": None}, {"positions": LENGTH}, {"phase": "uptrain"}):
        at_zero = dataclasses.replace(recipe, **change)
        assert train(model, tmp_path / "at-zero", at_zero).student.first_position(7) == 0
    tokens, keys, plain = Rows(LENGTH)[0].unsqueeze(0), [], []

    def watched(keys):
        return lambda layer, q, k, v, scale: keys.append(k) or Dense()(layer, q, k, v, scale)

    with torch.no_grad():
        hidden = student.read(tokens, watched(keys), 3)
        expected = student.base.get_decoder()(input_ids=tokens, attend=watched(plain)).last_hidden_state
        long = torch.cat([tokens.new_zeros(1, first[3]), tokens], 1)  # layer 0 sees embeddings only
        later = []
        student.base.get_decoder()(input_ids=long, attend=watched(later))
    torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(keys[0], later[0][:, :, first[3] :], rtol=1e-3, atol=1e-4)
    assert first[3] > 0 and (keys[0] - plain[0]).abs().max() > 0.1


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
ROTATIONS = [
    (PLAIN, 4096, None),
    ({"full_attention": PLAIN, "sliding_attention": PLAIN}, 100, None),
    (PLAIN, 4097, "positions: lower --positions"),
    (PLAIN | {"rope_type": "longrope"}, 100, r"\(longrope\), so its rows must begin at 0: set --positions to"),
    (PLAIN | {"llama_4_scaling_beta": 0.1}, 100, "attends differently further out"),
    ({"a": PLAIN, "b": PLAIN | {"rope_type": "dynamic"}}, 100, "attends differently further out"),
    (None, 100, "no rotary embeddings"),
]


@pytest.mark.parametrize("rope, positions, message", ROTATIONS)
def test_positions_need_a_rotation_that_stays(model, rope, positions, message):
    config = load_model(model, torch.float32).config
    config.rope_parameters = rope
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_positions(SimpleNamespace(config=config), positions)
