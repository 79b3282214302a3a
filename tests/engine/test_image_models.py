"""Models that take images: their text is served as that of the language model alone."""

from __future__ import annotations

import pytest
import torch
from engine.image_models import without_images, write_image_model, write_processor
from engine.kinds import BLOCK, TOLERANCE
from engine.tiny_engine import PROMPTS, configure, generate, quick, scores, stop
from threads import one_thread

from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import OracleModel, OraclePolicy, write_tiny_model

POLICY = {"policy": "streaming-llm", "budget": 56, "sinks": 4}
ORACLE = OraclePolicy.streaming(4, 52, 0)
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_requests_with_images(image_model, monkeypatch, kind):
    """A budget of the whole prompt equals stock vLLM, and chunks change no answer of a small one, where images are causal."""
    pytest.importorskip("torchvision", reason="needs torchvision, which vLLM reads images with")
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry

    folder, _ = image_model(kind)
    write_processor(folder, kind)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0, ignore_eos=True)
    noise = torch.randint(256, (112, 112, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    image = Image.fromarray(noise.numpy())
    text = "hello <|vision_start|><|image_pad|><|vision_end|> what is this? "
    prompts = [{"prompt": text * n, "multi_modal_data": {"image": [image] * n}} for n in (1, 2)]
    sizes = {"max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, "dtype": "float32", "enforce_eager": True}
    sizes |= {"block_size": BLOCK, "limit_mm_per_prompt": {"image": 2, "video": 0}, "enable_prefix_caching": False}

    def answers(budget: int | None, **options) -> list[list[tuple[int, float]]]:
        settings = {} if budget is None else {"kv_policy": POLICY | {"budget": budget}}
        with one_thread(), quick():
            llm = LLM(str(folder), additional_config=settings, **sizes | options)
            try:
                return [scores(answer) for answer in llm.generate(prompts, params, use_tqdm=False)]
            finally:
                stop(llm)

    stock, full, small = answers(None), answers(512), answers(40)
    in_chunks = answers(40, long_prefill_token_threshold=16)
    for one, other in ((stock, full), (small, in_chunks)):
        for ours, theirs in zip(one, other, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs]
            assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=TOLERANCE)
    assert all(one != other for one, other in zip(stock, small, strict=True)), "evicted tokens matter"
