"""TriAttention: statistics of queries, their files, and values that the authors' code computed."""

import json
import math
from pathlib import Path

import pytest
import torch
from policies.matrix import ROPE, random_statistics_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Phi3Config, Phi3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvpop_vllm.calibrate.statistics import QuerySums, query_statistics
from kvpop_vllm.calibration.statistics import QueryStatistics, read_statistics, write_statistics
from kvpop_vllm.config import ConfigError, PolicySettings
from kvpop_vllm.hf.layer import LayerRows
from kvpop_vllm.model_hook import Dense, load_model
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.policies.triattention import TriAttention
from kvpop_vllm.rope import rope_of
from kvpop_vllm.rules.rounds import expected_logits, interval
from kvpop_vllm.testing.models import write_smollm3, write_tiny_model
from kvpop_vllm.testing.oracle_rounds import retained_by_rounds
from kvpop_vllm.testing.oracle_statistics import read_query_statistics

pytestmark = pytest.mark.usefixtures("few_threads")

AUTHORS = Path(__file__).parents[1] / "data" / "triattention.safetensors"
"""Values of the authors' code; the repository and its commit are in the file's metadata.

``queries [Hq, T, D]`` at positions 0 to T - 1 and ``keys [H, n, D]`` at ``positions [H, n]`` are not rotated. Per
rotation there are the statistics of the queries (``mean [Hq, D]``, ``norm [Hq, D / 2]``), the scores ``[Hq, n]`` of
the rotated keys after 700 tokens, and the 40 of them that each KV head keeps ``[H, 40]``.
"""
SEEN = 700
SHAPE = ModelShape("llama", 2, 2, 32, 4096, num_heads=4, rope=ROPE)


def policy(folder: Path, shape: ModelShape = SHAPE) -> TriAttention:
    return TriAttention(PolicySettings("triattention", 512, calibration=str(folder)), shape)


def rotated(x: torch.Tensor, positions: torch.Tensor, rotary) -> torch.Tensor:
    """Return vectors ``[n, D]`` rotated to ``positions [n]`` by transformers."""
    cos, sin = rotary(x[None], positions[None])
    return apply_rotary_pos_emb(x[None, None], x[None, None], cos, sin)[0][0, 0]


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn"])
def test_the_authors_code_computes_the_same(tmp_path, kind):
    """Statistics, scores and kept keys are those of the authors' code. YaRN scales statistics and keys by its factor."""
    values = load_file(AUTHORS)
    with safe_open(AUTHORS, "pt") as file:
        rope = json.loads(file.metadata()["ropes"])[kind]
    queries, keys, positions = values["queries"], values["keys"], values["positions"]
    sizes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_size=128, num_hidden_layers=1)
    config = LlamaConfig(**sizes, max_position_embeddings=2048, rope_parameters=dict(rope))
    rotary, rope_parameters = LlamaRotaryEmbedding(config=config), rope_of(config.to_dict())
    sums, factor = QuerySums(rope_parameters), rotary.attention_scaling
    q = torch.stack([rotated(head, torch.arange(head.shape[0]), rotary) for head in queries])[None]
    sums(0, q, q, q, 1.0)
    mean, norm = ((by_layer[0] / sums.tokens[0]).float() for by_layer in (sums.mean, sums.norm))
    torch.testing.assert_close(mean, factor * values[f"{kind}.mean"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norm, factor * values[f"{kind}.norm"], atol=1e-5, rtol=1e-5)
    write_statistics(tmp_path, QueryStatistics("llama", 1, 4, 2, 32, rope_parameters, sums.tokens[0], [mean], [norm]))
    rounds = (
        policy(tmp_path, ModelShape("llama", 1, 2, 32, 4096, num_heads=4, rope=rope_parameters))
        .layer_rule(0, slice(2))
        .rounds
    )
    cached = torch.stack([rotated(*head, rotary) for head in zip(keys, positions, strict=True)])
    ranking, scores = expected_logits(cached, rounds, SEEN), values[f"{kind}.scores"].double()
    scores = (scores - scores.mean(1, keepdim=True)) / scores.std(1, correction=0, keepdim=True)
    torch.testing.assert_close(ranking.double(), scores.unflatten(0, (2, 2)).amax(1), atol=5e-4, rtol=0)
    assert ranking.topk(40).indices.sort().values.tolist() == values[f"{kind}.kept"].tolist()


@pytest.mark.parametrize("protected", [0, 70])
def test_at_sizes_of_serving(tmp_path, protected):
    """Rounds of 128 tokens. Retained sets are the oracle's at each end of a chunk."""
    rule, budget = policy(random_statistics_folder(tmp_path, SHAPE)).layer_rule(1, slice(2)), 420
    topk, length = budget - rule.sinks - rule.window, budget + protected + 300
    assert (rule.sinks, rule.window, interval(rule.rounds.every, topk)) == (4, 128, 128)
    draw = torch.Generator().manual_seed(12)
    q, k, v = (torch.randn(heads, length, 32, generator=draw) for heads in (4, 2, 2))
    shape = (0, (0, 0), protected, rule.sinks, rule.window, topk, read_query_statistics(tmp_path)[1])
    exact = (x.double() for x in (q, k, v))
    visible, margins, _, _ = retained_by_rounds(*exact, "expected logits", *shape)
    assert float(margins.min()) > 1e-6, "a near-tie: choose another seed"
    rows, end = LayerRows(rule, budget, k[None], 32**-0.5, protected=protected), 0
    for count in (budget, 1, 63, 64, 1, 100, length - budget - 229):
        rows.append(*(x[None, :, end : end + count] for x in (q, k, v)))
        end += count
        assert torch.equal(rows.held_by_rows()[0], visible[:, end - 1, :end]), f"after {end} tokens"
    assert not torch.equal(visible[0, -1], visible[1, -1])


def test_a_rank_of_half_the_heads_has_their_values(tmp_path):
    triattention = policy(random_statistics_folder(tmp_path, SHAPE))
    keys = torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(1))
    of_all_heads = expected_logits(keys, triattention.layer_rule(1, slice(0, 2)).rounds, SEEN)
    for head in range(2):
        rounds = triattention.layer_rule(1, slice(head, head + 1)).rounds
        torch.testing.assert_close(expected_logits(keys[head : head + 1], rounds, SEEN), of_all_heads[head : head + 1])


@pytest.mark.parametrize("rope", [{"partial_rotary_factor": 0.5}, {"unrotated_layers": [0]}], ids=str)
def test_channels_that_do_not_rotate_have_the_same_logit_at_any_distance(tmp_path, rope):
    """Values equal a mean over distances of logits of rotated mean queries, plus norms, channel by channel."""
    pairs, draw = (8 if "partial_rotary_factor" in rope else 0), torch.Generator().manual_seed(2)
    mean, rope = torch.randn(1, 32, generator=draw), ROPE | rope
    bands = [(i, i + pairs) for i in range(pairs)] + [(i,) for i in range(2 * pairs, 32)]
    of_mean = torch.stack([mean[:, list(band)].norm(dim=1) for band in bands], 1)
    norm = of_mean + torch.rand(1, len(bands), generator=draw)
    write_statistics(tmp_path, QueryStatistics("llama", 1, 1, 1, 32, rope, 1, [mean], [norm]))
    rounds = (
        policy(tmp_path, ModelShape("llama", 1, 1, 32, 4096, num_heads=1, rope=rope)).layer_rule(0, slice(1)).rounds
    )
    keys = torch.randn(1, 20, 32, generator=draw)
    ranking, expected = expected_logits(keys, rounds, 300)[0].double(), []
    for key in keys[0].double():
        value = 0.0
        for f, band in enumerate(bands):
            value += float(norm[0, f] - of_mean[0, f]) * math.hypot(*key[list(band)].tolist())
            query = mean[0, list(band)].tolist()
            if len(band) == 1:
                value += query[0] * float(key[band[0]])
                continue
            for d in (2**i for i in range(17)):
                angle = (300 + d) * 10000.0 ** (-2 * f / 16)
                later = complex(*query) * complex(math.cos(angle), math.sin(angle))
                value += (later * complex(*key[list(band)].tolist()).conjugate()).real / 17
        expected.append(value)
    expected = torch.tensor(expected, dtype=torch.float64)
    expected = (expected - expected.mean()) / expected.std(correction=0)
    torch.testing.assert_close(ranking, expected, atol=1e-3, rtol=0)


# Measured statistics


ROWS = [[5, 9, 2, 30, 7, 7, 11], [], [1, 2, 3]]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "smollm3"])
def test_statistics_are_those_of_queries_before_the_rotation(tmp_path, kind):
    """The model's own queries before the rotation are taken by hooks. SmolLM3's last layer does not rotate."""
    folder = write_smollm3(tmp_path) if kind == "smollm3" else write_tiny_model(tmp_path, kind)
    model = load_model(folder, torch.float32).eval()
    statistics = query_statistics(model, ROWS)
    unrotated = [3] if kind == "smollm3" else []
    assert statistics.tokens == 10 and statistics.rope.get("unrotated_layers", []) == unrotated
    projected: dict[int, list] = {}
    for i, layer in enumerate(model.get_decoder().layers):
        last = getattr(layer.self_attn, "q_norm", None) or layer.self_attn.q_proj

        def take(module, args, out, i=i):
            projected.setdefault(i, []).append(out.reshape(-1, 4, 32))

        last.register_forward_hook(take)
    with torch.no_grad():
        for row in filter(None, ROWS):
            model(torch.tensor([row]), attend=Dense())
    assert len(projected) == statistics.num_layers
    for i, rows in projected.items():
        q = torch.cat(rows)
        torch.testing.assert_close(statistics.mean[i], q.mean(0), atol=1e-5, rtol=1e-4)
        norms = q.abs() if i in unrotated else q.unflatten(-1, (2, 16)).norm(dim=-2)
        torch.testing.assert_close(statistics.norm[i], norms.mean(0), atol=1e-5, rtol=1e-4)


def changed_rope(folder: Path, **rope) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= rope
    (folder / "config.json").write_text(json.dumps(config))
    return folder


STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = STRETCHED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn"} | STRETCHED,
        {"rope_type": "llama3"} | LLAMA3,
    ],
    ids=lambda rope: next(iter(rope.values())),
)
def test_scaled_rotations_are_undone(tmp_path, rope):
    """Each layer's query rotates as the config says; files say it too."""
    statistics = query_statistics(
        load_model(changed_rope(write_tiny_model(tmp_path), **rope), torch.float32).eval(), ROWS
    )
    write_statistics(tmp_path / "statistics", statistics)
    shape = ModelShape.of(tmp_path, 4096)
    assert shape.rope == statistics.rope == read_statistics(tmp_path / "statistics").rope
    assert policy(tmp_path / "statistics", shape).statistics.tokens == 10


def test_a_model_that_rotates_half_of_its_channels(tmp_path):
    """Phi-3 rotates the first channels of a head."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = Phi3Config(**sizes, num_key_value_heads=1, rope_parameters=rope, pad_token_id=0, eos_token_id=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Phi3ForCausalLM(config).save_pretrained(tmp_path)
    statistics = query_statistics(load_model(tmp_path, torch.float32).eval(), ROWS)
    assert [tuple(norm.shape) for norm in statistics.norm] == [(2, 8 + 16)] * 2
    write_statistics(tmp_path / "statistics", statistics)
    assert policy(tmp_path / "statistics", ModelShape.of(tmp_path, 4096)).statistics.rope == statistics.rope


LONGROPE = STRETCHED | {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 4.0}, LONGROPE], ids=["dynamic", "longrope"])
def test_rotations_that_change_with_the_length_are_refused(tmp_path, rope):
    model = load_model(changed_rope(write_tiny_model(tmp_path), **rope), torch.float32)
    with pytest.raises(ConfigError, match="rotary embeddings of type .* change with the length of a text") as caught:
        query_statistics(model, ROWS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rope", [{"rope_theta": 5000.0}, {"partial_rotary_factor": 0.5}], ids=str)
def test_a_model_that_rotates_in_another_way_is_refused(tmp_path, rope):
    """Its config says another base of the wavelengths than that of its rotation, or a part of the channels."""
    model = load_model(write_tiny_model(tmp_path), torch.float32)
    model.config.rope_parameters |= rope
    with pytest.raises(ConfigError, match="^layer 0 of the model does not rotate queries and keys as its config says"):
        query_statistics(model, ROWS)


def test_no_texts(tmp_path):
    with pytest.raises(ConfigError, match="^0 of 2 layers have attended: give texts"):
        query_statistics(load_model(write_tiny_model(tmp_path), torch.float32), [[]])


# Files and refusals


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "qwen3"}, "a model with model_type = 'llama', this one has 'qwen3': calibrate this model, or"),
        ({"num_layers": 3}, "num_layers = 2, this one has 3"),
        ({"num_heads": 8}, "num_heads = 4, this one has 8"),
        ({"rope": ROPE | {"rope_theta": 5e5}}, "rotary embeddings with rope_theta = 10000.0, this one has 500000.0"),
        (
            {"rope": ROPE | {"rope_type": "linear", "factor": 2.0}},
            "rotary embeddings with factor = None, this one has",
        ),
        ({"rope": None}, "layers of this model have different rotary embeddings, or none: choose another policy"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(map(str, value)),
)
def test_statistics_of_another_model_are_refused(tmp_path, change, message):
    policy(random_statistics_folder(tmp_path, SHAPE))
    with pytest.raises(ConfigError, match=message) as caught:
        policy(tmp_path, ModelShape(**(vars(SHAPE) | change)))
    assert "\n" not in str(caught.value)


VALUES = {
    "version": {"version": 2},
    "unknown key": {"more": 1},
    "tokens": {"tokens": 0},
    "many layers": {"num_layers": 10**6},
    "text": {"num_layers": "2"},
    "rope": {"rope": {"rope_type": "default", "rope_theta": -1}},
    "heads": {"num_kv_heads": 3},
}
"""Wrong values in the first file, by the name of the damage."""


def damage(folder: Path, kind: str) -> None:
    """Damage a folder of statistics in one way."""
    config, tensors = folder / "queries.json", folder / "queries.safetensors"
    values = load_file(tensors)
    config.write_text(json.dumps(json.loads(config.read_text()) | VALUES.get(kind, {})))
    if kind == "nan":
        values["layers.1.mean"][0, 0] = math.nan
    elif kind == "shape":
        values["layers.1.norm"] = values["layers.1.norm"][:, 1:].contiguous()
    elif kind == "small norm":
        values["layers.1.norm"].zero_()
    elif kind == "renamed":
        values["layers.1.other"] = values.pop("layers.1.norm")
    save_file(values, tensors)
    if kind == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-5])
    elif kind == "no tensors":
        tensors.unlink()
    elif kind == "no config":
        config.unlink()
    elif kind == "no json":
        config.write_text("{")


DAMAGES = {
    "version": "says format 'kvpop-query-statistics' version 2, and is not that of a query-statistics of version 1",
    "unknown key": "has an unknown key 'more'",
    "tokens": "tokens must be an integer from 1 to .*, got 0: calibrate the model again",
    "many layers": "holds 4 tensors, not 2 for each of 1000000 layers",
    "text": "num_layers must be an integer from 1 to .*, got '2'",
    "rope": "rope_theta of rope is -1, not a number above 0",
    "heads": "3 KV heads do not divide 4 heads",
    "nan": "tensor layers.1.mean holds values that are not finite float32 numbers",
    "shape": r"tensor layers.1.norm has shape \(4, 15\), expected \(4, 16\)",
    "small norm": "tensor layers.1.norm is below the norm of layers.1.mean",
    "renamed": "tensor layers.1.norm is missing",
    "cut": "is not a complete safetensors file",
    "no tensors": "no statistics at .*: queries.safetensors is missing",
    "no config": "no statistics at .*: queries.json is missing; give a folder of 'kvpop calibrate'",
    "no json": "cannot be read as JSON",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_folders_are_refused_in_one_line(tmp_path, kind):
    damage(random_statistics_folder(tmp_path, SHAPE), kind)
    with pytest.raises(ConfigError, match=DAMAGES[kind]) as caught:
        policy(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_calibration_is_asked_for_where_it_is_used():
    with pytest.raises(ConfigError, match="needs statistics of the model's queries: give --kv-calibration DIR, which"):
        TriAttention(PolicySettings("triattention", 512), SHAPE)
