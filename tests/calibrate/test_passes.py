"""Passes of rows under policies: what is measured again, and what is not."""

import pytest
import torch

from kvpop_vllm.calibrate import passes as module
from kvpop_vllm.calibrate.passes import EQUAL, SEARCH, Choice, Passes
from kvpop_vllm.evaluation.policies import training_free
from kvpop_vllm.model_hook import Dense, load_model
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.testing import random_prompt, write_tiny_model

LENGTH, ROWS = 96, 3


class CountedPasses(Passes):
    """Passes that count those of the dense model."""

    dense = 0

    def _log_probabilities(self, tokens, prompt, attend):
        self.dense += isinstance(attend, Dense)
        return super()._log_probabilities(tokens, prompt, attend)


class InMemory(dict):
    """Records without a file."""

    def __contains__(self, key):
        return super().__contains__(str(key))

    def __getitem__(self, key):
        return super().__getitem__(str(key))

    def put(self, key, value):
        """Keep a measurement."""
        self[str(key)] = value


@pytest.mark.parametrize(
    "side, bytes_kept, dense", [(SEARCH, 1 << 28, ROWS), (SEARCH, 0, 2 * ROWS), ("judge", 1 << 28, 2 * ROWS)]
)
def test_a_search_reads_each_row_once_with_the_dense_model(tmp_path, monkeypatch, side, bytes_kept, dense):
    """Judges read it again, since they time it, and so does a search whose predictions take too much memory."""
    monkeypatch.setattr(module, "DENSE_BYTES", bytes_kept)
    folder = write_tiny_model(tmp_path / "model", "qwen3")
    model = load_model(folder, torch.float32).eval()
    shape = ModelShape.in_context(str(folder), LENGTH)
    rows = [(torch.tensor(random_prompt(LENGTH, seed=seed)), 0) for seed in range(ROWS)]
    choices = [Choice("h2o", budget, 8, EQUAL) for budget in (24, 48)]
    passes = CountedPasses(model, shape, {"h2o": training_free("h2o")}, False, 1, InMemory())
    apart = [passes.over(side, rows, [choice], lambda: None)[0] for choice in choices]
    assert passes.dense == dense
    together = CountedPasses(model, shape, {"h2o": training_free("h2o")}, False, 1, InMemory())
    losses = [[record["kl"] for record in records] for records in apart]
    assert losses == [
        [record["kl"] for record in records] for records in together.over(side, rows, choices, lambda: None)
    ]
    assert min(map(min, losses)) > 0 and losses[0] > losses[1]
