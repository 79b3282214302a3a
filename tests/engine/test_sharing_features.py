"""Protected prompts with features of vLLM that make or distinguish requests: beam search, LoRA."""

import json
from types import SimpleNamespace

import pytest
import torch
from engine.driving import Job, watched
from engine.judge import Judge
from safetensors.torch import load_file, save_file

from kvpop_vllm.testing import random_prompt

RANK = 4
TEXT = random_prompt(90, seed=97)


@pytest.mark.parametrize("policy", ["kvpop", "streaming-llm"])
def test_beam_search_equals_stock_s(case, policy, monkeypatch):
    """Beams and scores equal those of stock vLLM, and all but the last block of a beam is hit.

    Each step of a beam is a new prompt, so nothing of it is evicted.
    """
    from vllm.sampling_params import BeamSearchParams

    block = 32  # smallest block of stock vLLM on a CPU
    matrix_case = case("qwen3", policy, protect_prompt=True, budget=26)
    beams = {}
    for name, settings in (("stock", None), ("ours", matrix_case.settings)):
        with watched(matrix_case.model, settings, enable_prefix_caching=True, block_size=block) as engine:
            tokenizer = SimpleNamespace(eos_token_id=-1, decode=lambda tokens, **options: "")
            monkeypatch.setattr(engine.llm.renderer, "get_tokenizer", lambda bound=tokenizer: bound)
            engine.recorder.clear()
            params = BeamSearchParams(beam_width=3, max_tokens=40, ignore_eos=True)
            (answer,) = engine.llm.beam_search([{"prompt_token_ids": TEXT[:50]}], params)
            beams[name] = {tuple(beam.tokens): beam.cum_logprob for beam in answer.sequences}
            assert not engine.leaks()
            new = [step.new for layers in engine.recorder.retained.values() for step in layers[0]]
    assert len(new) > 2 * 40 and new[0] == 50 and max(new[1:]) <= block
    assert len(beams["stock"]) == 3 and beams["ours"].keys() == beams["stock"].keys()
    for tokens, score in beams["stock"].items():
        assert beams["ours"][tokens] == pytest.approx(score, abs=1e-3)


def adapter(base: str, folder, seed: int):
    """Write a LoRA adapter of the attention projections and the merged model, and return both folders."""
    generator, scale = torch.Generator().manual_seed(seed), 2.0
    weights, lora_weights = load_file(f"{base}/model.safetensors"), {}
    for name, weight in list(weights.items()):
        if any(name.endswith(f"{letter}_proj.weight") for letter in "qkvo"):
            out, width = weight.shape
            a = torch.randn(RANK, width, generator=generator) / width**0.5
            b = torch.randn(out, RANK, generator=generator) * weight.std() / 2
            weights[name] = weight + scale * b @ a
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            lora_weights |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    merged, lora = folder / "merged", folder / "adapter"
    for path in (merged, lora):
        path.mkdir(parents=True)
    (merged / "config.json").write_bytes(open(f"{base}/config.json", "rb").read())
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": scale * RANK, "bias": "none"}
    config |= {"target_modules": [f"{letter}_proj" for letter in "qkvo"]}
    (lora / "adapter_config.json").write_text(json.dumps(config))
    save_file(lora_weights, lora / "adapter_model.safetensors")
    return merged, lora


@pytest.mark.parametrize("policy", ["kvpop", "streaming-llm"])
def test_adapters_do_not_share(case, tmp_path, policy):
    """A prompt under the base model and two adapters hits only blocks of its own adapter.

    Each answer is compared with the oracle on the model whose weights contain the adapter.
    """
    from vllm.lora.request import LoRARequest

    matrix_case = case("qwen3", policy, protect_prompt=True, budget=26)
    judges, adapters = {None: matrix_case.judge}, {None: None}
    for number, name in enumerate(("first", "second"), 1):
        merged, lora = adapter(matrix_case.model, tmp_path / name, seed=number)
        judges[name] = Judge(str(merged), matrix_case.judge.policy, protect=True)
        adapters[name] = LoRARequest(name, number, str(lora))
    hits, options = [], {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with watched(matrix_case.model, matrix_case.settings, **options) as engine:
        for names in (
            [None],
            ["first", "second"],
        ) * 2:  # on a CPU vLLM mixes no requests with and without LoRA
            owners = [name for name in names for _ in range(2)]
            jobs = [
                Job(new=30, prompt=TEXT[:n], scored=False, adapter=adapters[name]) for name in names for n in (49, 70)
            ]
            answers = engine.serve(jobs)
            hits.append(sorted(a.num_cached_tokens for a in answers.values()))
            for name in names:
                mine = {key: a for key, a in answers.items() if owners[int(a.request_id)] == name}
                assert len(mine) == 2
                engine.check(mine, judges[name])
            assert not engine.leaks()
    assert hits == [[0, 48], [0, 0, 48, 48], [48, 64], [48, 48, 64, 64]]
