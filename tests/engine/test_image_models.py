"""Models that take images: their text is served as that of the language model alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine.image_models import ImageOracle, without_images, write_image_model
from engine.kinds import BLOCK, TOLERANCE
from engine.tiny_engine import PROMPTS, configure, generate

from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import OracleModel, OraclePolicy, write_tiny_model

POLICY = {"policy": "streaming-llm", "budget": 56, "sinks": 4}
ORACLE, SMALL = OraclePolicy.streaming(4, 52, 0), OraclePolicy.streaming(4, 36, 0)
TORCHVISION = "torchvision==0.28.0"
TEXTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}
"""Model types of the language models."""


@pytest.fixture
def image_model(request, family, tmp_path):
    """Return ``make(kind)``, which writes a model and returns its folder and log-probabilities by the oracle."""

    def make(kind: str):
        if kind in ("gemma3", "gemma4", "llama4"):
            text, oracle = family(TEXTS[kind])
            return write_image_model(tmp_path / "model", kind, text), lambda fed: oracle.logprobs(fed, ORACLE)
        text = write_tiny_model(tmp_path / "text", TEXTS[kind], hidden=128, vocab=264)
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


@pytest.mark.parametrize(
    "kind, feature",
    [
        ("gemma3", "bidirectional image attention"),
        ("gemma4", "bidirectional image attention"),
        ("llama4", "images of Llama 4 on a CPU"),
    ],
)
def test_images_that_are_refused(image_model, kind, feature):
    """The line names the flag with which text is served."""
    folder, _ = image_model(kind)
    with without_images(), pytest.raises(ConfigError, match="serve text alone with --language-model-only") as caught:
        configure(folder, POLICY)
    assert feature in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="session")
def torchvision(tmp_path_factory) -> Path:
    """Return a folder with the torchvision that belongs to torch 2.13, without what it requires."""
    folder = tmp_path_factory.mktemp("torchvision")
    words = "pip install --quiet --no-deps --only-binary :all: --target".split()
    got = subprocess.run([sys.executable, "-m", *words, str(folder), TORCHVISION], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"pip has no {TORCHVISION}, which reads images")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_requests_with_images(image_model, torchvision, tmp_path, kind):
    """Answers are the oracle's, in chunks too; with a budget of the whole prompt they are stock vLLM's.

    Queries attend to images causally in these models, and tokens of images are evicted like others.
    """
    folder, _ = image_model(kind)
    words = "-m", "engine.image_requests", torchvision, folder, kind, tmp_path / "answers"
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, *map(str, words)], env=variables, check=True)
    results = torch.load(tmp_path / "answers")
    oracle = ImageOracle(folder, results["pixels"], results["grid"])
    policies = {"stock": None, "whole": None, "small": SMALL, "chunks": SMALL}
    for name, policy in policies.items():
        for prompt, answer in results[name]:
            assert prompt.count(oracle.image_token) >= 16
            tokens = [token for token, _ in answer]
            rows = oracle.logprobs([*prompt, *tokens[:-1]], policy)[len(prompt) - 1 :]
            for row, (token, score) in zip(rows, answer, strict=True):
                assert abs(float(row[token]) - score) <= TOLERANCE and float(row.max() - row[token]) <= 2 * TOLERANCE
    for one, other in zip(results["stock"], results["small"], strict=True):
        assert one[1] != other[1], "evicted tokens matter"
