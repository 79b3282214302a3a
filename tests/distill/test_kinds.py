"""Scorers of models with layers of several kinds are trained for those with full attention, and evaluated there."""

from __future__ import annotations

import json

import pytest
import torch
from distill.tiny_text import VOCABULARY, write_byte_tokenizer, write_text
from engine.driving import Job
from engine.kinds import Served, distance_of_engine, serving
from hf.prompts import distinct
from safetensors.torch import load_file
from threads import one_thread
from transformers import AutoModelForCausalLM, GraniteConfig, Starcoder2Config

from kvpop_vllm import model_hook
from kvpop_vllm.calibration.shares import read_calibration
from kvpop_vllm.cli import main
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.sparse_attention import Sparse
from kvpop_vllm.evaluation.output import read_records
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.local_attention import local_attention
from kvpop_vllm.model_hook import CACHE_NAME, Dense, check_rotation, load_model
from kvpop_vllm.model_shape import kinds_of, rope_of
from kvpop_vllm.roles import Retention
from kvpop_vllm.scorers import build
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.supported import CHUNKED, FULL, SLIDING
from kvpop_vllm.testing import FAMILIES, KindsOracle, OraclePolicy, write_mixed_model

TOLERANCE = 1e-5
ATTENDING = [kind for kind, keys in FAMILIES.items() if {*keys["layer_types"]} <= {FULL, SLIDING, CHUNKED}]
TRAINED = [pytest.param(kind, marks=() if kind == "gemma3_text" else pytest.mark.slow) for kind in ATTENDING]
TRAIN = (
    "distill --recipe=demo --data text.jsonl --length=160 --positions=160 --window=8 --topk=20 --lists=16 --warmup=2 --batch=2"
    " --dtype=float32 --lr-new=1e-2 --fit-decays --fit-decay-rows=2 --threads=1"
).split()


CALIBRATE = "calibrate --data text.jsonl --length 128 --rows 8 --threads 1".split()
PHASES = {
    "base": "--recipe=demo --positions=300 --window=8 --topk=20 --lists=16 --train-base --warmup=2",
    "uptrain": "--phase=uptrain",
    "streaming-plus": "--phase=streaming-plus --window=8 --topk=20",
}
GATES = {
    "trimkv": "--recipe=trimkv --topk=23 --gate-width=16 --gate-bias=5 --warmup=2",
    "dms": "--recipe=dms --window=8 --topk=23 --gate-scale=5 --warmup=2",
    "dms-query": "--recipe=dms --window=8 --topk=23 --gate-scale=5 --warmup=2 --gate-reads=query --train-base",
    "kvzap": "--recipe=kvzap --window=8 --topk=23 --gate-width=16 --warmup=2",
}
QUICK = {("gemma3_text", "dms-query"), ("gpt_oss", "trimkv"), ("nemotron_h", "kvzap")}
"""Gates that are trained in quick tests too."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with text, and a model with a tokenizer for each family."""
    folder = tmp_path_factory.mktemp("kinds")
    write_text(folder / "text.jsonl", documents=200)
    for kind in ATTENDING:
        write_byte_tokenizer(write_mixed_model(folder / kind, kind, vocab_size=VOCABULARY))
    return folder


@pytest.fixture(scope="module", params=TRAINED)
def trained(request, root):
    """Return the folders of a model and of a scorer that was trained for it, and the model's oracle."""
    kind = request.param
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.chdir(root)
        assert not main([*TRAIN, "--model", kind, "--out", f"{kind}-scorer", "--steps=30"])
    return root / kind, root / f"{kind}-scorer", KindsOracle(root / kind)


@pytest.mark.parametrize("kind", ATTENDING)
def test_layers_that_a_policy_does_not_act_on_attend_as_in_transformers(root, kind):
    """Logits are those of transformers; only layers with full attention are handed over."""
    tokens = torch.tensor([distinct(200)])
    expected = AutoModelForCausalLM.from_pretrained(root / kind, dtype=torch.float32, attn_implementation="eager")(
        tokens
    )
    model, layers = load_model(root / kind, torch.float32), []

    def attend(layer, *inputs, **options):
        layers.append(layer)
        return Dense()(layer, *inputs, **options)

    attend.takes_sinks = True
    torch.testing.assert_close(model(tokens, attend=attend).logits, expected.logits, rtol=1e-4, atol=1e-5)
    assert layers == list(range(FAMILIES[kind]["layer_types"].count(FULL)))


def test_the_rotation_of_gemma_4(root):
    """A part of the channels rotates, over the whole head, by angles in proportion to the position."""
    model = load_model(root / "gemma4_text", torch.float32)
    rope = rope_of(model.config)
    assert (rope["rope_type"], rope["partial_rotary_factor"]) == ("proportional", 0.25)
    check_rotation(model, rope)
    with pytest.raises(ConfigError, match="layer 0 of the model does not rotate queries and keys as its config says"):
        check_rotation(model, rope | {"rope_type": "default"})


def test_layers_find_their_kind_once(root, monkeypatch):
    """Not in every pass."""
    model, blocks = load_model(root / "gemma3_text", torch.float32), []
    monkeypatch.setattr(model_hook, "kinds_of", lambda config: blocks.append(config) or kinds_of(config))
    for _ in range(3):
        model(torch.tensor([distinct(20)]), attend=Dense())
    assert len(blocks) == len(model.model.layers)


def test_a_scorer_has_tensors_for_layers_with_full_attention_and_says_which(trained):
    folder, scorer, oracle = trained
    layers = [i for i, kind in enumerate(oracle.kinds) if kind == FULL]
    config, tensors = read_scorer(scorer)
    assert config.layers == tuple(layers) and config.num_layers == len(tensors) == len(layers)
    lost = json.loads((scorer / "run/decays.json").read_text())
    assert lost["lost_mass"] < 1 and len(lost["decays"]) == len(layers)


def check_recall(root, run_kvpop, monkeypatch, folder, scorer, layers: int) -> None:
    """Check that a scorer's recall on held-out text, by so many layers, is 1.3 times that of a window of as many slots."""
    monkeypatch.chdir(root)
    words = f"eval --model {folder.name} --data text.jsonl --split test --equal k --scorer {scorer.name} --policies streaming-llm"
    words += (
        " --budget 32 --sinks 4 --window 8 --length 48 160 --rows 4 --dtype float32 --threads 1 --out records.jsonl"
    )
    status, _, errors = run_kvpop(*words.split())
    assert status in (0, None), errors
    recalls: dict[str, list[float]] = {}
    for record in read_records("records.jsonl")[1]:
        if "teacher" in record:
            assert len(record["teacher_by_layer"]) == layers
            if record["length"] == 160:
                recalls.setdefault(record["policy"], []).append(record["teacher"])
    means = {name: sum(values) / len(values) for name, values in recalls.items()}
    assert means[scorer.name] > 1.3 * means["streaming-llm"], means


def test_recall_of_held_out_text_is_above_the_windows(trained, root, run_kvpop, monkeypatch):
    """`kvpop eval` judges the layers that the scorer is for, whether its rows fit into a window or not."""
    folder, scorer, oracle = trained
    check_recall(root, run_kvpop, monkeypatch, folder, scorer, oracle.kinds.count(FULL))


@pytest.mark.slow
def test_recurrent_layers_are_left_to_transformers(root, run_kvpop, monkeypatch):
    """Qwen3-Next: logits are those of transformers; scorers, recall and a calibration are those of attention layers.

    The scorer serves; in bfloat16 log-probabilities are within twice stock vLLM's distance from the oracle.
    """
    folder, scorer = root / "qwen3_next", root / "qwen3_next-scorer"
    write_byte_tokenizer(write_mixed_model(folder, "qwen3_next", vocab_size=VOCABULARY))
    tokens, options = torch.tensor([distinct(200)]), {"dtype": torch.float32, "attn_implementation": "eager"}
    expected = AutoModelForCausalLM.from_pretrained(folder, **options)(tokens).logits
    actual = load_model(folder, torch.float32)(tokens, attend=Dense()).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    monkeypatch.chdir(root)
    with one_thread():
        assert not main([*TRAIN, "--model", folder.name, "--out", scorer.name, "--steps=20"])
    assert read_scorer(scorer)[0].layers == (1, 3, 5)
    check_recall(root, run_kvpop, monkeypatch, folder, scorer, 3)
    status, _, errors = run_kvpop(*CALIBRATE, folder.name, "--out=qwen3_next-calibration")
    assert status == 0 and read_calibration("qwen3_next-calibration").layers == (1, 3, 5), errors
    words = "eval --task reasoning --rows=1 --kinds=programs --size=2 --split=test --policies h2o --budget 56 --equal=k".split()
    status, _, errors = run_kvpop(*words, "--model", folder.name, "--dtype=float32", "--threads=1")
    assert status == 0, errors
    oracle = KindsOracle(folder)
    tolerance = 2 * distance_of_engine(str(folder), "qwen3_next", None, oracle)
    with serving(str(folder), {"policy": "kvpop", "scorer": str(scorer)}, "qwen3_next") as engine:
        served = Served(engine, oracle, OraclePolicy.from_scorer(scorer), tolerance, by_inputs=True)
        served.serve([Job(1, new=60), Job(31), Job(150)], 16)


def test_training_and_serving_are_one_rule(trained):
    """Log-probabilities of the pass of training, and of a KVpopCache, are the oracle's."""
    folder, scorer, oracle = trained
    prompt, policy = distinct(180), OraclePolicy.from_scorer(scorer)
    exact = oracle.logprobs(prompt, policy)
    model = load_model(folder, torch.float32)
    config, tensors = read_scorer(scorer)
    scorers = [build(config) for _ in tensors]
    for module, state in zip(scorers, tensors, strict=True):
        module.load_state_dict(state)

    def score(layer, k, v, roles):
        return scorers[layer](k, v, window=roles.window), scorers[layer].log_gamma()

    sizes = config.sinks + config.window + config.topk, config.sinks, config.window
    cache = KVpopCache(model, "kvpop", scorer=scorer)
    for attention in ({"attend": Sparse(score, Retention(*sizes, step=config.decay.step))}, {CACHE_NAME: cache}):
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), **attention).logits[0]
        assert float((logits.double().log_softmax(-1) - exact).abs().max()) <= TOLERANCE


@pytest.mark.slow
def test_the_folder_serves(trained):
    """Retained sets of an engine follow the oracle: log-probabilities of prompts in chunks, and of answers, are its."""
    folder, scorer, oracle = trained
    settings = {"policy": "kvpop", "scorer": str(scorer)}
    with serving(str(folder), settings) as engine:
        served = Served(engine, oracle, OraclePolicy.from_scorer(scorer))
        for chunk in (16, 128):
            served.serve([Job(1, new=60), Job(31), Job(150)], chunk)


def test_a_layer_that_has_a_window_where_its_config_says_none_is_refused(tmp_path):
    """Layers of Starcoder 2 have the config's window all, whatever kinds the config lists."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = Starcoder2Config(**sizes, num_hidden_layers=2, num_key_value_heads=1, head_dim=32, sliding_window=24)
    config.layer_types = ["full_attention", "sliding_attention"]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokens, message = torch.zeros(1, 40, dtype=torch.long), "layer 0 of the model has a sliding window of 24 tokens"
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, torch.float32)(tokens, attend=Dense())
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    cache = KVpopCache(model, "streaming-llm", budget=32)
    with torch.no_grad(), pytest.raises(ConfigError, match=message):
        model(tokens, **{CACHE_NAME: cache})


def test_attention_sinks_with_what_does_not_take_them_are_refused(root, run_kvpop, monkeypatch):
    """Log-normalisers have no gradient; calibrations have no sinks."""
    monkeypatch.chdir(root)
    write_text(root / "text.jsonl", documents=200)
    for words, message in (
        (
            [*TRAIN, "--train-base"],
            "gradients do not pass through attention sinks: train scorers alone, with --no-train-base",
        ),
        (CALIBRATE, "the model has attention sinks, which this does not take: choose another model"),
    ):
        place = ["gpt_oss"] if words is CALIBRATE else ["--model=gpt_oss", "--steps=1"]
        status, _, errors = run_kvpop(*words, *place, f"--out=refused-{len(words)}")
        assert status == 2 and message in errors.splitlines()[-1]


def test_models_that_rescale_logits_are_trained_where_none_are_read(tmp_path, run_kvpop, monkeypatch):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = GraniteConfig(**sizes, num_hidden_layers=1, num_key_value_heads=1, head_dim=32, logits_scaling=8.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    write_byte_tokenizer(tmp_path / "model")
    write_text(tmp_path / "text.jsonl")
    monkeypatch.chdir(tmp_path)
    status, _, errors = run_kvpop(*TRAIN, "--model=model", "--out=scorer", "--steps=1")
    assert status in (0, None) and read_scorer("scorer")[0].num_layers == 1, errors
    status, _, errors = run_kvpop(*TRAIN, "--model=model", "--out=other", "--steps=1", "--train-base")
    assert status == 2 and "rescales its logits (logits_scaling)" in errors


@pytest.mark.parametrize(
    "kind, feature", [("gemma3_text", "layers other than full attention"), ("gpt_oss", "attention sinks of its own")]
)
def test_cartridges_are_refused(root, run_kvpop, monkeypatch, kind, feature):
    """In one line: by `kvpop compact`, and by the task of `kvpop eval` that compares them."""
    monkeypatch.chdir(root)
    (root / "corpus.txt").write_text("A few words. " * 40)
    corpus = f"eval --task corpus --model {kind} --data text.jsonl --split all --length 100 --threads 1"
    for words in (f"compact {kind} --data corpus.txt --slots 64 --out cartridge --threads 1", corpus):
        status, _, errors = run_kvpop(*words.split())
        assert status == 2 and f"a cartridge cannot serve a model with {feature}" in errors.splitlines()[-1], errors


def train(root, monkeypatch, kind: str, words: str, out: str) -> None:
    """Train for four steps, in the folder of the models and texts."""
    monkeypatch.chdir(root)
    words = f"distill --model={kind} --data text.jsonl --length=160 --dtype=float32 --steps=4 --out={out} {words}"
    with one_thread():
        assert not main([*words.split(), "--threads=1"])


@pytest.mark.slow
@pytest.mark.parametrize("name", PHASES)
def test_bases_train_through_windows(root, monkeypatch, name):
    train(root, monkeypatch, "gemma3_text", f"--batch=2 {PHASES[name]}", f"phase-{name}")
    weight = "model.layers.0.self_attn.v_proj.weight"  # of a layer with a window
    folders = root / "gemma3_text", root / f"phase-{name}/model"
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert not torch.equal(before[weight], after[weight])


@pytest.mark.parametrize(
    "kind, name",
    [
        pytest.param(kind, name, marks=() if (kind, name) in QUICK else pytest.mark.slow)
        for kind in ("gemma3_text", "gpt_oss", "nemotron_h")
        for name in GATES
    ],
)
def test_gates_of_layers_with_full_attention(root, monkeypatch, kind, name):
    """A KVpopCache and an engine serve the folder as the oracle does, a borrowed channel with the model that gave it up."""
    if not (root / kind).exists():
        write_byte_tokenizer(write_mixed_model(root / kind, kind, vocab_size=VOCABULARY))
    out, policy = root / f"{kind}-{name}", name.partition("-")[0]
    train(root, monkeypatch, kind, f"--batch=1 --lr-new=1e-2 {GATES[name]}", out.name)
    folder = out / "model" if name == "dms-query" else root / kind
    oracle, exact = KindsOracle(folder), OraclePolicy.from_scorer(out)
    layers = [i for i, layer_kind in enumerate(oracle.kinds) if layer_kind == FULL]
    assert read_scorer(out)[0].layers == tuple(layers)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt, cache = distinct(180), KVpopCache(model, policy, scorer=out)
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), **{CACHE_NAME: cache}).logits[0]
    assert float((logits.double().log_softmax(-1) - oracle.logprobs(prompt, exact)).abs().max()) <= TOLERANCE
    with serving(str(folder), {"policy": policy, "scorer": str(out)}, kind) as engine:
        Served(engine, oracle, exact, by_inputs=True).serve([Job(1, new=60), Job(150)], 16)


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [("gemma3_text", "trimkv"), ("gpt_oss", "kvzap"), ("nemotron_h", "kvzap")])
def test_recall_of_gates(root, run_kvpop, monkeypatch, kind, name):
    """Gates of layers with full attention keep more of what held-out text attends to than a window does.

    There is no recall of `dms`, which leaves slots free.
    """
    if not (root / kind).exists():
        write_byte_tokenizer(write_mixed_model(root / kind, kind, vocab_size=VOCABULARY))
    out = root / f"recall-{kind}-{name}"
    train(root, monkeypatch, kind, f"--batch=2 --lr-new=1e-2 {GATES[name]} --steps=40", out.name)
    check_recall(root, run_kvpop, monkeypatch, root / kind, out, FAMILIES[kind]["layer_types"].count(FULL))


@pytest.mark.parametrize("kind, size", [(SLIDING, 40), (CHUNKED, 70)])
def test_gradients_pass_through_attention_with_sinks(kind, size):
    """They are those of a softmax over the keys and one more logit, in float32 on a CPU."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 70, 16, generator=draw).requires_grad_() for heads in (4, 2, 2))
    sinks, weights = torch.randn(4, generator=draw), torch.randn(2, 4, 70, 16, generator=draw)
    out = local_attention(q, k, v, 0.25, kind, size, sinks)
    ours = torch.autograd.grad((out * weights).sum(), (q, k, v))
    distance = torch.arange(70)[:, None] - torch.arange(70)
    visible = (distance >= 0) & (distance < size)
    logits = (q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.25).masked_fill(~visible, -torch.inf)
    shares = torch.cat([logits, sinks.view(1, 4, 1, 1).expand(2, 4, 70, 1)], 3).softmax(-1)[..., :-1]
    exact = torch.autograd.grad((shares @ v.repeat_interleave(2, 1) * weights).sum(), (q, k, v))
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
