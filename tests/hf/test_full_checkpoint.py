"""Checkpoints with their own scorers need no scorer folder."""

import shutil

import pytest
import torch
from hf.prompts import generate
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.scorers.export import SCORER_SHARD, export_checkpoint
from kvpop_vllm.testing import random_prompt, write_random_scorer

PROMPTS = [random_prompt(90), random_prompt(70)]


@pytest.fixture(scope="module", params=[("llama", "mlstm", "kvpop"), ("qwen3", "dms", "dms")], ids=lambda p: p[0])
def exported(request, tiny, tmp_path_factory):
    """Return the base model, its scorer, the export of both, and the policy."""
    kind, scorer, policy = request.param
    base, root = tiny(kind)[0], tmp_path_factory.mktemp("exported")
    sizes = {"features": 8, "value_width": 24} if scorer == "mlstm" else {"reads": "query", "evict": 0.5}
    adapter = write_random_scorer(root / "adapter", base, scorer, **sizes)
    export_checkpoint(base, adapter, root / "full")
    return tiny(kind)[1], adapter, root / "full", policy


def test_the_scorer_comes_with_the_model(exported):
    base, adapter, full, policy = exported
    model, loaded = AutoModelForCausalLM.from_pretrained(full, output_loading_info=True)
    assert not any(loaded.values()), "a user would be warned of tensors"
    assert generate(model, None, PROMPTS) == generate(base, None, PROMPTS)
    expected = generate(base, KVpopCache(base, policy, scorer=adapter), PROMPTS)
    assert generate(model, KVpopCache(model, policy), PROMPTS) == expected != generate(base, None, PROMPTS)
    assert generate(model, KVpopCache(model, policy, scorer=adapter), PROMPTS) == expected
    assert generate(model, KVpopCache(model, "h2o", budget=40), PROMPTS)
    assert all(parameter.dtype is torch.float32 and "kvpop" not in name for name, parameter in model.named_parameters())


def test_what_is_wrong_with_it(exported, tmp_path):
    _, _, full, policy = exported
    folder = shutil.copytree(full, tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(folder)
    other_policy = {"kvpop": "dms", "dms": "kvpop"}[policy]
    with pytest.raises(ConfigError, match=f"policy {other_policy} needs a scorer of kind .*use policy {policy}"):
        KVpopCache(model, other_policy)
    tensors = load_file(folder / SCORER_SHARD)
    gone = sorted(tensors)[0]
    save_file({name: t for name, t in tensors.items() if name != gone}, folder / SCORER_SHARD)
    with pytest.raises(ConfigError, match=f"tensor layers.0.{gone.split('kvpop.')[1]} is missing"):
        KVpopCache(model, policy)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="the model was not loaded from a folder .*: give scorer DIR"):
        KVpopCache(model, policy)
