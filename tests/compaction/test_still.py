"""STILL: the compactor against loops, its start, its loss and training, runs that are stopped, files and refusals."""

import json
import math
import shutil

import compaction_kl
import pytest
import torch
from compaction.test_trained import stock_logp, write_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from kvpop_vllm.cli import main
from kvpop_vllm.compaction.cartridge import read_cartridge
from kvpop_vllm.compaction.compactor_files import CONFIG_NAME, TENSORS_NAME, read_compactor
from kvpop_vllm.compaction.compactor_training import StillOptions, StillTrainer, example_of, still_losses
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.run import load
from kvpop_vllm.compaction.still import Compactor, LayerCompactor, latent_positions
from kvpop_vllm.hf import KVpopCache

SLOTS, TOKENS = 64, 300
ROPES = {
    "default": ({"rope_type": "default", "rope_theta": 100.0}, 1.0),
    "linear": ({"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}, 4.0),
}
RUN = ["--slots", str(SLOTS), "--window", "128", "--batch", "2", "--steps", "4", "--save-every", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("still") / "model")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    letters = torch.randint(97, 123, (TOKENS // 6, 5), generator=torch.Generator().manual_seed(0)).tolist()
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("".join(bytes(row).decode() + " " for row in letters))
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a JSONL file of forty random documents."""
    draws = torch.Generator().manual_seed(1)
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [bytes(torch.randint(97, 123, (200,), generator=draws).tolist()).decode() for _ in range(40)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def train(model, texts, out, *options, code=0):
    assert main(["train-compactor", str(model), "--data", str(texts), "--out", str(out), *RUN, *options]) == code


def compact(model, corpus, out, *options, code=0):
    arguments = ["compact", str(model), "--data", str(corpus), "--out", str(out), "--threads", "1", "--method", "still"]
    assert main([*arguments, *map(str, options)]) == code


@pytest.fixture(scope="module")
def trained(model, texts, tmp_path_factory):
    """Return the folder of a run that nothing has stopped."""
    out = tmp_path_factory.mktemp("trained") / "c"
    train(model, texts, out)
    return out


def disturbed(module, seed=0, size=0.2):
    """Return a module with noise on all its parameters."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += size * torch.randn(parameter.shape, generator=draws)
    return module


# ---- an oracle of lists and loops, in float64


def rotate(x, position, theta, factor):
    half, rotated = len(x) // 2, [0.0] * len(x)
    for i in range(half):
        angle = position / factor * theta ** (-2 * i / len(x))
        rotated[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        rotated[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return rotated


def times(weight, x, bias=None):
    return [sum(w * a for w, a in zip(row, x, strict=True)) + (bias[i] if bias else 0) for i, row in enumerate(weight)]


def normed(x, weight):
    size = math.sqrt(sum(a * a for a in x) / len(x) + 1e-6)
    return [a / size * w for a, w in zip(x, weight, strict=True)], size


def oracle_attention(p, name, latents, memory, places, positions, theta=10000.0, factor=1.0):
    outputs = []
    keys = [
        rotate(times(p[f"{name}.key.weight"], x, p[f"{name}.key.bias"]), position, theta, factor)
        for x, position in zip(memory, positions, strict=True)
    ]
    for z, place in zip(latents, places, strict=True):
        q = rotate(times(p[f"{name}.query.weight"], z, p[f"{name}.query.bias"]), place, theta, factor)
        logits = [sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q)) for k in keys]
        chances = [math.exp(logit - max(logits)) for logit in logits]
        read = [
            sum(c * x[i] for c, x in zip(chances, memory, strict=True)) / sum(chances) for i in range(len(memory[0]))
        ]
        outputs.append(times(p[f"{name}.out.weight"], read))
    return outputs


def oracle(p, k, v, latents, theta, factor):
    """Return keys, values and biases of one head, from lists."""
    tokens, slots, dim = len(k), len(latents), len(k[0])
    places = [round(j * (tokens - 1) / (slots - 1)) for j in range(slots)]
    ks, vs = p["scale"]
    memory = [
        [a / ks for a in rotate(key, -t, theta, factor)] + [a / vs for a in value]
        for t, (key, value) in enumerate(zip(k, v, strict=True))
    ]
    sizes = None
    for n in (0, 1):
        read = oracle_attention(p, f"blocks.{n}.cross", latents, memory, places, range(tokens))
        normed_sums = [
            normed([a + b for a, b in zip(z, x, strict=True)], p[f"blocks.{n}.cross_norm.weight"])
            for z, x in zip(latents, read, strict=True)
        ]
        latents, sizes = [z for z, _ in normed_sums], sizes or [size for _, size in normed_sums]
        read = oracle_attention(p, f"blocks.{n}.self", latents, latents, places, places)
        latents = [
            normed([a + b for a, b in zip(z, x, strict=True)], p[f"blocks.{n}.self_norm.weight"])[0]
            for z, x in zip(latents, read, strict=True)
        ]
    heads = list(zip(latents, sizes, places, strict=True))
    own_k = [
        rotate([a * size * ks for a in times(p["k.weight"], z)], position, theta, factor) for z, size, position in heads
    ]
    own_v = [[a * size * vs for a in times(p["v.weight"], z)] for z, size, _ in heads]
    assert len(own_k[0]) == dim
    return own_k, own_v, [times(p["bias.weight"], z, p["bias.bias"])[0] for z in latents]


@pytest.mark.parametrize("kind", ROPES)
def test_equals_loops(kind):
    rope, factor = ROPES[kind]
    dim, heads, tokens, slots = 6, 2, 12, 4
    layer = disturbed(LayerCompactor(dim, 4, rope))
    draws = torch.Generator().manual_seed(3)
    layer.scale.copy_(torch.tensor([2.0, 0.5]))
    k, v, latents = (torch.randn(shape, generator=draws) for shape in ((heads, tokens, dim),) * 2 + ((slots, 2 * dim),))
    with torch.no_grad():
        slots_of_heads = layer(k, v, latents)
    p = {name: value.double().tolist() for name, value in layer.state_dict().items()}
    for head in range(heads):
        args = (x.double().tolist() for x in (k[head], v[head], latents))
        expected = oracle(p, *args, 100.0, factor)
        for part, expected_part in zip(slots_of_heads, expected, strict=True):
            torch.testing.assert_close(part[head].double(), torch.tensor(expected_part).double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ],
)
def test_untrained_compactor_keeps_evenly_spaced_tokens(model, corpus, rope):
    """The biases are 0. Keys and values are nearly those of tokens, of any length of text and any model's rotation."""
    base = load(str(model), "float32")
    caches = read_corpus(base, list(corpus.read_bytes()))
    compactor = Compactor(2, 32, SLOTS, rope)
    compactor.measure(caches)
    for tokens in (SLOTS, 2 * SLOTS + 1, TOKENS):
        places = latent_positions(tokens, SLOTS)
        assert places[0] == 0 and places[-1] == tokens - 1 and len(places.unique()) == SLOTS
        assert int(places.diff().max() - places.diff().min()) <= 1
        with torch.no_grad():
            layers = compactor([(k[:, :tokens], v[:, :tokens]) for k, v in caches])
        for slots, cache in zip(layers, caches, strict=True):
            assert not slots[2].any()
            for part, full in zip(slots[:2], cache, strict=True):
                assert (part - full[:, places]).norm() < 0.05 * part.norm()


def test_losses_are_those_of_transformers(model, corpus):
    """The student's slots are those of the compactor, and its positions go on at T."""
    base, tokens, size = load(str(model), "float32"), list(corpus.read_bytes()), 200
    compactor = disturbed(Compactor(2, 32, SLOTS, {"rope_type": "default", "rope_theta": 10000.0}), size=0.05)
    for layer in compactor.layers:
        torch.nn.init.zeros_(layer.bias.weight), torch.nn.init.zeros_(layer.bias.bias)  # which transformers has not
    with torch.no_grad():
        kl, ce = still_losses(base, compactor, torch.tensor(tokens), size)
        past = DynamicCache()
        for i, (k, v, _) in enumerate(compactor(read_corpus(base, tokens[:size]))):
            past.update(k.unsqueeze(0), v.unsqueeze(0), i)
        plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
        places = torch.arange(size, len(tokens))[None]
        student = plain(torch.tensor([tokens[size:]]), past_key_values=past, position_ids=places).logits[0, :-1]
    student, teacher = student.log_softmax(-1), stock_logp(model, tokens)[size:-1]
    assert float(kl) == pytest.approx(float((teacher.exp() * (teacher - student)).sum(-1).mean()), rel=1e-3)
    assert float(ce) == pytest.approx(-float(student[range(len(student)), tokens[size + 1 :]].mean()), rel=1e-4)
    assert float(kl) > 1e-3


def test_table_compares_truncation_the_start_and_what_was_trained(model, texts, corpus, tmp_path, capsys):
    base, truncation = load(str(model), "float32"), compaction_kl.truncated(SLOTS)
    tokens, size = torch.tensor(list(corpus.read_bytes())), 200
    numbers = torch.arange(size).expand(2, -1)[..., None]
    (kept_keys, *_), *_ = truncation([(numbers, numbers)])
    assert kept_keys[0, :, 0].tolist() == [*range(4), *range(size - SLOTS + 4, size)]
    assert float(still_losses(base, compaction_kl.truncated(size), tokens, size)[0]) == pytest.approx(0, abs=1e-6)
    train(model, texts, tmp_path / "c", "--lr", "0.01")
    compaction_kl.main(
        ["compactor", str(model), str(tmp_path / "c"), "--data", str(texts), "--documents", "8", "--threads", "1"]
    )
    _, shown, _, *rows = capsys.readouterr().out.splitlines()
    assert shown.startswith("8 windows of at most 128 tokens, 64 slots")
    assert rows[0].count("1.00 (1.00 to 1.00)") == 2
    name, lost, *_ = zip(*(row.split() for row in rows), strict=True)
    assert name == ("truncation", "untrained", "trained") and len(set(lost)) == 3


def test_examples_go_on_or_repeat():
    options, row = StillOptions(slots=64, window=128), torch.arange(160)
    sizes = set()
    for number in range(40):
        tokens, size = example_of(row, number, options)
        assert 64 <= size <= 128 and len(tokens) == size + 32
        assert tokens[:size].tolist() == list(range(128 - size, 128))
        following, window = tokens[size:].tolist(), tokens[:size].tolist()
        assert following == list(range(following[0], following[0] + 32))
        assert (following[0] == 128) if number % 2 == 0 else set(following) <= set(window)
        sizes.add(size)
    assert len(sizes) > 20


def test_gradient_reaches_all_of_the_compactor_and_none_of_the_model(model, corpus):
    base = load(str(model), "float32")
    compactor = disturbed(Compactor(2, 32, SLOTS, {"rope_type": "default", "rope_theta": 10000.0}), size=0.05)
    kl, ce = still_losses(base, compactor, torch.tensor(list(corpus.read_bytes())), 200)
    (kl + ce).backward()
    assert [
        name for name, parameter in compactor.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ] == []
    assert all(parameter.grad is None for parameter in base.parameters())


def test_training_lowers_the_loss_on_other_text(model, tmp_path):
    """It begins with noise on all parameters, because a random model has little to gain from better slots."""
    base, options = load(str(model), "float32"), StillOptions(slots=64, window=128, steps=25, batch=1, lr=3e-3, ce=0.0)
    rows = torch.randint(97, 123, (80, 160), generator=torch.Generator().manual_seed(5))
    compactor = disturbed(Compactor(2, 32, SLOTS, {"rope_type": "default", "rope_theta": 10000.0}), size=0.1)
    compactor.measure(read_corpus(base, rows[0, :128].tolist()))

    @torch.no_grad()
    def held_out():
        examples = [example_of(rows[i], i, options) for i in range(70, 80)]
        return sum(float(still_losses(base, compactor, *example)[0]) for example in examples)

    before = held_out()
    StillTrainer(base, compactor, rows, tmp_path, options, quiet=True).run()
    assert held_out() < 0.6 * before


def test_run_that_was_stopped_equals_a_whole_one(model, texts, trained, tmp_path, monkeypatch):
    out, step = tmp_path / "c", StillTrainer.step

    def stop(self, number):
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StillTrainer, "step", stop)
        train(model, texts, out)
    assert not (out / CONFIG_NAME).exists() and (out / "run" / "step-2").is_dir()
    train(model, texts, out)
    for name in (CONFIG_NAME, TENSORS_NAME, "run/metrics.jsonl"):
        assert (out / name).read_bytes() == (trained / name).read_bytes()
    assert len((out / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    tensors = load_file(trained / TENSORS_NAME)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert {path.name for path in trained.iterdir()} == {"run", CONFIG_NAME, TENSORS_NAME}


def test_from_a_text_to_a_cartridge(model, corpus, trained, tmp_path, capsys):
    compact(model, corpus, tmp_path / "cartridge", "--compactor", trained)
    assert capsys.readouterr().out.startswith(f"{SLOTS} slots for {TOKENS} tokens, ")
    cartridge, stored = read_cartridge(tmp_path / "cartridge"), read_compactor(trained, model)
    config = cartridge.config
    assert (config.slots, config.next_position, config.method) == (SLOTS, len(b"<user>") + TOKENS + 2, "still")
    assert config.provenance["compactor"] == {"sha256": stored.digest}
    base = load(str(model), "float32")
    with torch.no_grad():
        expected = stored.module(read_corpus(base, list(b"<user>" + corpus.read_bytes() + b"\n\n")))
    for layer, expected_layer in zip(cartridge.layers, expected, strict=True):
        for part, expected_part in zip(layer, expected_layer, strict=True):
            assert expected_part.any() and torch.equal(part, expected_part)
    plain = AutoModelForCausalLM.from_pretrained(model)
    cache = KVpopCache(plain, "streaming-llm", budget=192, cartridge=tmp_path / "cartridge")
    with torch.no_grad():
        assert plain(torch.tensor([[97, 98, 99]]), past_key_values=cache).logits.isfinite().all()


def edited(**values):
    """Return a function that changes a compactor's config. None removes a key."""

    def edit(folder):
        raw = json.loads((folder / CONFIG_NAME).read_text()) | values
        (folder / CONFIG_NAME).write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))

    return edit


def changed(name, change):
    """Return a function that replaces a tensor of a compactor, or removes it if ``change`` returns None."""

    def edit(folder):
        tensors = load_file(folder / TENSORS_NAME)
        tensor = change(tensors.pop(name))
        save_file(tensors | ({} if tensor is None else {name: tensor.contiguous()}), folder / TENSORS_NAME)

    return edit


def truncated(folder):
    path = folder / TENSORS_NAME
    path.write_bytes(path.read_bytes()[:-10])


HEAD = "layers.1.k.weight"
DAMAGES = {
    "no folder": (shutil.rmtree, "no compactor at"),
    "no tensors": (lambda folder: (folder / TENSORS_NAME).unlink(), f"{TENSORS_NAME} is missing"),
    "no json": (lambda folder: (folder / CONFIG_NAME).write_text("{"), "cannot be read as JSON"),
    "other format": (edited(format="kvpop-cartridge"), "is not that of a compactor of version 1"),
    "newer version": (edited(version=2), "is not that of a compactor of version 1"),
    "missing key": (edited(width=None), "misses key 'width'"),
    "unknown key": (edited(heads=3), "has an unknown key 'heads'"),
    "wrong type": (edited(width="32"), "width has an impossible value '32'"),
    "truth": (edited(slots=True), "slots has an impossible value True"),
    "slots": (edited(slots=65), "slots 65 or width 32 is impossible"),
    "base": (edited(base={}), "base must hold the digests"),
    "layers": (edited(num_layers=3), "num_layers = 3"),
    "rope": (edited(rope={"rope_type": "default", "rope_theta": 7.0}), "rope_theta = 7.0"),
    "weights": (edited(base={"config": None, "weights": "a"}), "other weights than those of"),
    "truncated": (truncated, "is not a complete safetensors file"),
    "missing tensor": (changed(HEAD, lambda tensor: None), f"misses tensor '{HEAD}'"),
    "shape": (changed(HEAD, lambda tensor: tensor[:-1]), f"tensor {HEAD} is F16 (31, 64), expected F16 (32, 64)"),
    "dtype": (changed(HEAD, lambda tensor: tensor.double()), f"tensor {HEAD} is F64 (32, 64)"),
    "nan": (changed(HEAD, lambda tensor: tensor * torch.nan), f"tensor {HEAD} holds NaN or infinity"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_compactors_are_refused(model, corpus, trained, tmp_path, capsys, case):
    damage, message = DAMAGES[case]
    folder = tmp_path / "compactor"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("run"))
    damage(folder)
    compact(model, corpus, tmp_path / "c", "--compactor", folder, code=2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "c").exists()


def test_refusals(model, corpus, texts, trained, tmp_path, capsys):
    def refused(message, act, *options):
        act(model, *options, code=2)
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1

    out, arguments = tmp_path / "c", ("--compactor", trained)
    refused("--method still needs a compactor", compact, corpus, out)
    refused("has 64 slots, not 128: leave --slots out", compact, corpus, out, *arguments, "--slots", 128)
    refused("--compactor is of --method still", compact, corpus, out, *arguments, "--method", "last")
    refused("--steps is of --method cartridge", compact, corpus, out, *arguments, "--steps", 3)
    refused(
        "--method attention-matching: leave it out", compact, corpus, out, *arguments, "--kv-calibration", "shares.json"
    )
    short = tmp_path / "short.txt"
    short.write_text("short")
    refused("fewer than 64 slots", compact, short, out, *arguments)
    refused("raise --window to 256", train, texts, out, "--slots", "128")
    refused("raise --window to 256", train, texts, out, "--slots", "65", "--window", "140")
    refused("--lr nan is not a number above 0", train, texts, out, "--lr", "nan")
    refused("are weights: give numbers from 0 on", train, texts, out, "--kl", "0", "--ce", "0")
    refused("holds a run with lr = 0.0001, not 0.5", train, texts, trained, "--lr", "0.5")
    refused("the model has 4096 positions", train, texts, out, "--window", "4096")
    assert not out.exists()


def test_other_base_and_long_corpora_are_refused(model, corpus, trained, tmp_path, capsys):
    copied = shutil.copytree(model, tmp_path / "other")
    weights = load_file(copied / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, copied / "model.safetensors", {"format": "pt"})
    compact(copied, corpus, tmp_path / "c", "--compactor", trained, code=2)
    assert "was made for other weights" in capsys.readouterr().err
    long = tmp_path / "long.txt"
    long.write_text("a" * 4096)
    compact(model, long, tmp_path / "c", "--compactor", trained, code=2)
    assert "4096 positions, too few for 4104 tokens" in capsys.readouterr().err
