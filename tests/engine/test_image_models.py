"""Models that take images: their text is served as that of the language model alone."""

from __future__ import annotations

import pytest
from engine.image_models import without_images, write_image_model
from engine.kinds import BLOCK, TOLERANCE
from engine.tiny_engine import PROMPTS, configure, generate

from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import OracleModel, OraclePolicy, write_tiny_model

POLICY = {"policy": "streaming-llm", "budget": 56, "sinks": 4}
ORACLE = OraclePolicy.streaming(4, 52, 0)
TEXTS = {"gemma3": "gemma3_text", "llama4": "llama4_text", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""Model types of the language models."""


@pytest.fixture
def image_model(request, family, tmp_path):
    """Return ``make(kind)``, which writes a model and returns its folder and log-probabilities by the oracle."""

    def make(kind: str):
        if kind in ("gemma3", "llama4"):
            text, oracle = family(TEXTS[kind])
            return write_image_model(tmp_path / "model", kind, text), lambda fed: oracle.logprobs(fed, ORACLE)
        text = write_tiny_model(tmp_path / "text", TEXTS[kind], hidden=128)
        model = OracleModel(text)
        return write_image_model(tmp_path / "model", kind, text), lambda fed: model.run(fed, ORACLE).logprobs

    return make


@pytest.mark.parametrize("kind", ["gemma3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*TEXTS][1:])])
def test_text_equals_the_oracle(image_model, kind):
    folder, logprobs = image_model(kind)
    with without_images():
        answers = generate(folder, POLICY, block_size=BLOCK, language_model_only=True)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = [token for token, _ in answer]
        rows = logprobs([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        for row, (token, score) in zip(rows, answer, strict=True):
            assert abs(float(row[token]) - score) <= TOLERANCE and float(row.max() - row[token]) <= 2 * TOLERANCE


def test_images_of_gemma_3_are_refused(image_model):
    """The line names the flag with which text is served."""
    folder, _ = image_model("gemma3")
    with without_images(), pytest.raises(ConfigError, match="serve text alone with --language-model-only") as caught:
        configure(folder, POLICY)
    assert "bidirectional image attention" in str(caught.value) and "\n" not in str(caught.value)
