"""Scorers of models of which a policy acts on some layers only."""

import json

import pytest

from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_shape import folder_sizes
from kvpop_vllm.scorers import make_config, parse_config
from kvpop_vllm.scorers.checkpoint import CONFIG_NAME, check_model, read_scorer
from kvpop_vllm.scorers.untrained import init_scorer
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

WINDOWS = {"model_type": "mistral", "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | WINDOWS))
    return model


def test_a_scorer_is_for_the_layers_with_full_attention(folder, tmp_path):
    """Its config lists them, its tensors are numbered among them, and it fits a model with the same ones only."""
    sizes = folder_sizes(folder)
    assert (sizes["num_layers"], sizes["layers"]) == (1, (1,))
    init_scorer(folder, tmp_path / "scorer", window=8, topk=20)
    config, tensors = read_scorer(tmp_path / "scorer")
    assert (config.num_layers, config.layers, len(tensors)) == (1, (1,), 1)
    assert json.loads((tmp_path / "scorer" / CONFIG_NAME).read_text())["layers"] == [1]
    check_model(config, **sizes, source="s")
    with pytest.raises(ConfigError, match=r"^s was made for a model with layers = \(1,\), this one has \(0,\)"):
        check_model(config, **sizes | {"layers": (0,)}, source="s")


def test_a_scorer_for_all_layers_has_no_such_key(tmp_path):
    """Its files are those of earlier versions, and do not fit a model with other layers."""
    model = write_tiny_model(tmp_path / "model")
    config = json.loads((write_random_scorer(tmp_path / "scorer", model) / CONFIG_NAME).read_text())
    read = parse_config(config, "s")
    assert read.layers == () and "layers" not in read.to_json()
    assert make_config(folder_sizes(model), "linear", source="s", sinks=1, window=2, topk=3).layers == ()
    with pytest.raises(ConfigError, match=r"made for a model with layers = \(\)"):
        check_model(read, **folder_sizes(model) | {"layers": (0, 2)}, source="s")


@pytest.mark.parametrize("layers", [[1, 0], [0, 0], [-1, 2], [0], [0, 1, 2], [0, 1.0], [False, True], "01", {"0": 1}])
def test_other_lists_of_layers_are_refused(tmp_path, layers):
    model = write_tiny_model(tmp_path / "model")
    config = json.loads((write_random_scorer(tmp_path / "scorer", model) / CONFIG_NAME).read_text())
    with pytest.raises(ConfigError, match="^s: layers must be a list of 2 ascending indices of layers, got ") as caught:
        parse_config(config | {"layers": layers}, "s")
    assert "\n" not in str(caught.value)
