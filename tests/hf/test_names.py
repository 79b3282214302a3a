"""Names under which versions of transformers know a cache, and the versions that are served."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from engine.matrix import BUDGET
from hf.prompts import padded
from transformers import DynamicCache

from kvpop_vllm.config import ConfigError, check_version
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.supported import TRANSFORMERS
from kvpop_vllm.testing import random_prompt

PROMPTS = [random_prompt(70), random_prompt(50)]
NAMES = "cache", "past_key_values"
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def model(tiny):
    return tiny("llama")[1]


def test_generate_takes_both_names(model):
    """A KVpopCache is taken under the older and the newer name, and no deprecated one is used by us."""
    tokens = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        for name in NAMES:
            cache = KVpopCache(model, "streaming-llm", budget=BUDGET)
            tokens.append(model.generate(**padded(PROMPTS), **{name: cache}, **GREEDY))
            assert cache.lengths == [77, 57]
            text = {
                "input_ids": tokens[-1],
                "attention_mask": torch.nn.functional.pad(padded(PROMPTS)["attention_mask"], (0, 8), value=1),
            }
            tokens[-1] = model.generate(**text, **{name: cache}, **GREEDY)
            assert cache.lengths == [85, 65]
    assert tokens[0].equal(tokens[1])


def test_a_model_takes_both_names(model):
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        dense = model(ids).logits
        for name in NAMES:
            cache = KVpopCache(model, "streaming-llm", budget=96)
            logits = torch.cat([model(part, **{name: cache}).logits for part in (ids[:, :40], ids[:, 40:])], 1)
            torch.testing.assert_close(logits, dense)
            assert cache.lengths == [70]


@pytest.mark.parametrize(
    "second", [lambda model: KVpopCache(model, "streaming-llm", budget=BUDGET), lambda _: DynamicCache()]
)
def test_two_caches_are_refused(model, second):
    caches = {NAMES[0]: second(model), NAMES[1]: KVpopCache(model, "streaming-llm", budget=BUDGET)}
    with pytest.raises(
        ConfigError, match="^a KVpopCache and another cache are given, as cache and as past_key_values: leave one out$"
    ):
        model.generate(torch.tensor(PROMPTS[:1]), **caches)


def test_positional_arguments_of_generate(model):
    """They keep their places, and criteria of the caller are kept."""
    lengths = []

    def stop(ids, scores, **options):
        lengths.append(ids.shape[1])
        return torch.full((len(ids),), ids.shape[1] >= 73)

    cache = KVpopCache(model, "streaming-llm", budget=BUDGET)
    out = model.generate(torch.tensor(PROMPTS[:1]), None, None, [stop], cache=cache, max_new_tokens=8)
    assert out.shape[1] == 73 and lengths == [71, 72, 73] and cache.lengths == [72]


@pytest.mark.parametrize("version", ["5.16.0", "5.19.0", "5.24.0", "5.24.3"])
def test_versions_that_are_served(version):
    check_version("transformers", version, TRANSFORMERS)


def test_pip_and_the_page_ask_for_the_same_versions():
    for name in ("pyproject.toml", "docs/operating.md"):
        assert f'"transformers{TRANSFORMERS}"' in (Path(__file__).parents[2] / name).read_text()


@pytest.mark.parametrize("version", ["4.57.6", "5.15.1", "5.25.0", "5.25.0.dev0", "6.0.0", "main"])
def test_other_versions(version):
    message = f"transformers {version} is not supported: install transformers{TRANSFORMERS}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_version("transformers", version, TRANSFORMERS)


def test_importing_with_another_version():
    """The version is checked before the import of names that another version may lack."""
    code = "import transformers; transformers.__version__ = '5.25.0'; import kvpop_vllm.hf"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message = f"ConfigError: transformers 5.25.0 is not supported: install transformers{TRANSFORMERS}"
    assert process.returncode == 1 and process.stderr.splitlines()[-1].endswith(message)
