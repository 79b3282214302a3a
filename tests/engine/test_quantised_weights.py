"""Weights in four bits, as compressed-tensors packs them, which vLLM multiplies on a CPU in bfloat16."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from engine.driving import BLOCK, Job, watched
from engine.matrix import BUDGET
from engine.tiny_engine import PROMPTS, running
from safetensors.torch import load_file, save_file

GROUP, NEW, NOISE = 32, 24, 0.1
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
}


@pytest.fixture(scope="module")
def packed(tiny_model, tmp_path_factory) -> Path:
    """Return the folder of a tiny model whose projections have four bits."""
    from vllm import _custom_ops  # noqa: F401  (registers the ops of this processor)

    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM multiplies weights in four bits on CPUs with AVX-512 only")
    base, folder = Path(tiny_model("qwen3")), tmp_path_factory.mktemp("packed")
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        groups = weight.unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(-1) / 7
        integers = (groups / scale.unsqueeze(-1)).round().to(torch.int8).flatten(1)
        packed = {"packed": pack_to_int32(integers, 4), "scale": scale, "shape": torch.tensor(weight.shape)}
        tensors |= {f"{name}_{part}": tensor for part, tensor in packed.items()}
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": SCHEME}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_it_evicts_as_the_oracle_says(case, packed):
    """At every step each head holds the tokens of the oracle, whose choice depends on positions only."""
    matrix_case = case("qwen3", "streaming-llm")
    with watched(packed, matrix_case.settings, dtype="bfloat16") as engine:
        layer = engine.recorder.runner.model.model.layers[0].self_attn.qkv_proj
        assert not layer.weight_packed.is_floating_point() and not hasattr(layer, "weight")
        answers = engine.serve([Job(length, new=NEW) for length in (5, BUDGET, 90, 130)])
        for name, answer in answers.items():
            tokens = [*answer.prompt_token_ids, *answer.outputs[0].token_ids[:-1]]
            matrix_case.judge.settle(tokens, engine.recorder.retained[name], [0.0, 0.0], name)
        engine.check_blocks()


def test_full_gives_the_tokens_of_stock_vllm(packed):
    """Tokens are equal up to a place where the two best are as near as rounding in bfloat16."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW, logprobs=2, detokenize=False, ignore_eos=True)
    outputs = []
    for settings, block in ((None, 2 * BLOCK), ({"policy": "full"}, BLOCK)):
        with running(packed, settings, block_size=block, dtype="bfloat16") as llm:
            answers = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
            outputs.append([answer.outputs[0] for answer in answers])
    equal = 0
    for stock, ours in zip(*outputs, strict=True):
        for token, our_token, entries, our_entries in zip(
            stock.token_ids, ours.token_ids, stock.logprobs, ours.logprobs, strict=True
        ):
            best, second = sorted((entry.logprob for entry in entries.values()), reverse=True)[:2]
            if token != our_token:
                assert best - second < NOISE
                break
            assert our_entries[token].logprob == pytest.approx(entries[token].logprob, abs=NOISE)
            equal += 1
    assert equal > NEW * len(PROMPTS) / 2
