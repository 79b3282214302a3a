"""The table of what is served and refused, and the documents and files that say the same."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvpop_vllm.cli import main
from kvpop_vllm.compaction.base_model import check_attention
from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.supported import (
    ARCHITECTURES,
    BORROWING,
    DTYPES,
    EQUAL,
    FAMILIES,
    HEAD_SIZES,
    KERNELS,
    REFUSED,
    STOCK_ARCHITECTURES,
    refused,
    unserved,
)

ROOT = Path(__file__).parents[2]
LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 64,
    "use_sliding_window": True,
    "no_rope_layers": [1, 0],
}
"""Layers of families whose default config has full attention alone, or none."""
STATES = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"]},
}


def document(name: str) -> str:
    return (ROOT / name).read_text()


def listed(values) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}"


def test_the_readme_says_what_is_served():
    dtypes = " or ".join(DTYPES["cpu"])
    assert f"- Head sizes are {listed(HEAD_SIZES)}. On a CPU the dtype is {dtypes}. " in document("README.md")


def test_the_documents_say_what_is_refused():
    text = document("docs/operating.md")
    table = text[text.index("## What is refused") : text.index("Errors of single requests")].lower()
    assert all(word in table for name in REFUSED for word in name.lower().split())
    assert f"| head sizes other than {listed(HEAD_SIZES)} |" in table
    assert f"| a gate of `dms` that borrows a channel of the queries, on other than {listed(BORROWING)} |" in table
    assert f"| float16 on a CPU | Use `--dtype {DTYPES['cpu'][0]}` or `{DTYPES['cpu'][1]}`. |".lower() in table


def test_the_document_of_the_kernels():
    text, largest = document("docs/kernels.md"), KERNELS["triton"].largest
    sizes = [f"multiples of {KERNELS[name].multiple}" for name in ("cpp", "triton")]
    assert f"| head sizes | any | {sizes[0]} | {sizes[1]} up to {largest} |" in text
    dtypes = [", ".join(KERNELS[name].dtypes) for name in ("cpp", "triton")]
    assert f"| dtypes of the cache | any | {dtypes[0]} | {dtypes[1]} |" in text


@pytest.mark.parametrize("op", dispatch.SERVING)
@pytest.mark.parametrize("name, platform", [("cpp", "cpu"), ("triton", "cuda")])
def test_what_is_served_has_kernels(op, name, platform):
    dtypes = {"cpp": dispatch.CPP_DTYPES, "triton": dispatch.TRITON_DTYPES}[name][op]
    kernels = KERNELS[name]
    assert [str(dtype) for dtype in dtypes] == [f"torch.{dtype}" for dtype in DTYPES[platform]]
    assert all(size % kernels.multiple == 0 and size <= (kernels.largest or size) for size in HEAD_SIZES)


def test_cpp_is_chosen_for_what_is_served():
    for size in (*HEAD_SIZES, 24):
        served = {
            dispatch.select("decode_step", torch.empty(1, 1, size, dtype=getattr(torch, d))) for d in DTYPES["cpu"]
        }
        assert served == ({"cpp"} if size in HEAD_SIZES else {"reference"})


def test_every_architecture_has_its_classes():
    from kvpop_vllm import model_types
    from kvpop_vllm.hf import full_checkpoint
    from kvpop_vllm.vllm_glue.run import models

    for kind, name in ARCHITECTURES.items():
        assert getattr(model_types, name.replace("ForCausalLM", "Config")).model_type == f"{kind}_kvpop"
        assert hasattr(full_checkpoint, name) and hasattr(models, name)
        assert STOCK_ARCHITECTURES[getattr(models, name).__mro__[2].__name__] == name


def test_what_only_the_reader_or_an_unknown_key_says():
    """tests/test_refusals.py has configs of models."""
    assert refused(SimpleNamespace(), {"MLA": True, "recurrent": 0}) == [REFUSED["MLA"]]


@pytest.mark.parametrize(
    "config",
    [{"use_attention_sinks": True}, {"model_type": "gpt_oss"}, {"model_type": "granite", "layer_types": ["attention"]}],
)
def test_attention_sinks_are_refused_by_compaction_alone(config):
    text = SimpleNamespace(**{"model_type": "llama", "max_position_embeddings": 64} | config)
    assert unserved(text, {}, 64) == []
    with pytest.raises(ConfigError, match="a model with attention sinks of its own: choose another model"):
        check_attention(text)


@pytest.mark.parametrize("name", ["layer_types", "layers_block_type"])
def test_layers_of_kinds_that_are_not_served(name):
    """The feature is named once, whether it is seen in the kinds of layers, in the window or in both."""
    recurrent, full = REFUSED["recurrent"].feature, {name: ["full_attention", "attention", "sliding_attention"]}
    assert unserved(SimpleNamespace(**full, sliding_window=64), {}, 64) == []
    assert unserved(SimpleNamespace(**{name: ["full_attention", "mamba"]}, sliding_window=64), {}, 100) == [recurrent]
    assert unserved(SimpleNamespace(**{name: ["attention"]}), {"MLA": True}, 64) == [REFUSED["MLA"].feature]


@pytest.mark.parametrize(
    "kind, key", [("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")]
)
def test_a_kind_without_its_size(kind, key):
    layers = {"layer_types": ["full_attention", kind]}
    assert unserved(SimpleNamespace(**layers, **{key: 64}), {}, 100) == []
    assert unserved(SimpleNamespace(**layers, **{key: None}), {}, 100) == [REFUSED["sliding-window"].feature]


@pytest.mark.parametrize("table", ["families", "commands", "memory"])
def test_the_document_of_models(table):
    """`python docs/models.py --write` writes the tables, memory from the configs in docs/configs."""
    assert runpy.run_path(str(ROOT / "docs/models.py"))[table]() in document("docs/models.md")


def test_the_document_has_the_estimate_of_copies():
    assert runpy.run_path(str(ROOT / "docs/models.py"))["copies"]() in document("docs/models.md")


def test_the_oracle_has_the_families_that_equal_it():
    from kvpop_vllm.testing import FAMILIES as MODELS

    assert {kind for family in FAMILIES if family.state == EQUAL for kind in family.model_types} == set(MODELS)


@pytest.mark.parametrize("kind", [kind for family in FAMILIES for kind in family.model_types])
def test_families_are_served_or_refused_as_the_table_says(tmp_path, capsys, kind):
    """`kvpop plan` takes what engines serve. Some model types have defaults of sizes that no engine serves."""
    (family,) = (family for family in FAMILIES if kind in family.model_types)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}
    layers = STATES.get(kind) or (LAYERS if family.served and family.layers != "all" else {})
    depth = {"num_hidden_layers": 2} if layers else {}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": kind, "dtype": "bfloat16"} | sizes | depth | layers)
    )
    options = ["--kv-memory", "1GiB", "--budget", "256", "--max-model-len", "4096"]
    assert (main(["plan", "--model", str(tmp_path), *options]) == 0) == family.served, capsys.readouterr()
    error = capsys.readouterr().err
    assert not error if family.served else REFUSED[family.state].feature in error
