"""`kvpop compact` from a text to a cartridge, used by transformers without any code of ours."""

import json

import pytest
import torch
from distill.byte_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from kvpop_vllm.cli import main
from kvpop_vllm.compaction.cartridge import read_cartridge, rope_at, rope_of, turned
from kvpop_vllm.compaction.prompt_place import place_of
from kvpop_vllm.compaction.queries import REPEAT, repeat_prefill
from kvpop_vllm.compaction.run import check_rotation, load
from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing.models import write_smollm3, write_tiny_model

TOKENS, SLOTS, OWN = 700, 128, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("compact") / "model", vocab=258, seed=3)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a file of random words out of a hundred."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (100, 4), generator=generator)
    words = [bytes(row.tolist()).decode() for row in letters]
    picks = torch.randint(100, (TOKENS // 5,), generator=generator)
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(words[i] for i in picks) + ".")
    return path


def compact(model, corpus, out, *options):
    words = f"compact {model} --data {corpus} --out {out} --slots {SLOTS} --threads 1"
    assert main([*words.split(), *options]) == 0
    return read_cartridge(out)


def answers(model, cartridge, continuation):
    """Return log-probabilities after a cartridge, by transformers with a mask per layer that carries the bias."""
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    config, cache = cartridge.config, DynamicCache()
    slots, count = config.slots, continuation.shape[1]
    causal = torch.full((count, count), -torch.inf).triu(1)
    for i, (k, v, bias) in enumerate(cartridge.layers):
        k = turned(k, slots - config.next_position, rope_at(config.rope, i))
        cache.update(k.unsqueeze(0), v.unsqueeze(0), i)
        block = plain.model.layers[i].self_attn
        bias = torch.zeros(k.shape[:2]) if bias is None else bias
        bias = bias.repeat_interleave(block.num_key_value_groups, 0).unsqueeze(1).expand(-1, count, -1)
        mask = torch.cat([bias, causal.expand(bias.shape[0], -1, -1)], -1).unsqueeze(0)

        def exchange(module, args, kwargs, mask=mask):
            return args, kwargs | {"attention_mask": mask}

        block.register_forward_pre_hook(exchange, with_kwargs=True)
    with torch.no_grad():
        return plain(continuation, past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)


def full_answers(model, tokens, continuation):
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    with torch.no_grad():
        return plain(torch.cat([tokens, continuation], 1)).logits[0, -continuation.shape[1] :].log_softmax(-1)


def divergence(full, compacted):
    return float((full.exp() * (full - compacted)).sum(-1).mean())


@pytest.fixture(scope="module")
def texts(corpus):
    """Return the corpus in the first message of a chat, and own tokens."""
    tokens = torch.tensor([list(b"<user>" + corpus.read_bytes() + b"\n\n")])
    return tokens, tokens[:, 100 : 100 + OWN]


@pytest.fixture(scope="module")
def last(model, corpus, texts, tmp_path_factory):
    """Return the divergence of the last tokens alone."""
    cartridge = compact(model, corpus, tmp_path_factory.mktemp("last") / "c", "--method", "truncation")
    assert cartridge.config.method == "last"
    return divergence(full_answers(model, *texts), answers(model, cartridge, texts[1]))


@pytest.fixture(scope="module")
def highest(model, corpus, tmp_path_factory):
    return compact(model, corpus, tmp_path_factory.mktemp("highest") / "c")


CASES = {
    "default": [],
    "pursuit": ["--keys", "omp"],
    "chunks": ["--chunk", "300"],
    "off policy": ["--no-on-policy"],
    "repeat-prefill": ["--queries", "repeat-prefill"],
}


@pytest.mark.parametrize("case", CASES)
def test_nearer_to_the_full_context_than_the_last_tokens(model, corpus, texts, last, highest, tmp_path, capsys, case):
    cartridge = compact(model, corpus, tmp_path / "c", *CASES[case])
    assert (cartridge.digest == highest.digest) == (case == "default")
    assert (cartridge.layers[1][0] != highest.layers[1][0]).any() == (case != "default")  # each option has an effect
    config = cartridge.config
    assert (config.slots, config.next_position, config.method) == (SLOTS, texts[0].shape[1], "attention-matching")
    size = len(corpus.read_bytes())
    assert config.head == list(b"<user>") and config.provenance["corpus"]["tokens"] == size
    assert capsys.readouterr().out.startswith(f"{SLOTS} slots for {size} tokens, ")
    fitted = divergence(full_answers(model, *texts), answers(model, cartridge, texts[1]))
    assert fitted < 0.6 * last


def test_all_of_the_corpus_is_repeated():
    """Pieces keep to their chunk and to the model's positions, and every other one has an instruction."""
    place, tokens = place_of(byte_tokenizer()), [i % 250 for i in range(TOKENS)]
    start, around = place.asking(REPEAT), len(place.head) + len(place.end)
    chunks = [(0, 300), (300, TOKENS + around)]
    reference = repeat_prefill(place, tokens, chunks, TOKENS + around + len(start) + 70)
    pieces = [ids[used:] for ids, used in zip(reference.sequences, reference.used, strict=True)]
    assert sum(pieces, []) == tokens and max(map(len, reference.sequences)) <= len(start) + 70
    assert [ids[:used] == start for ids, used in zip(reference.sequences, reference.used, strict=True)][:4] == [
        False,
        True,
    ] * 2
    assert sum(len(ids) for ids, number in zip(pieces, reference.chunks, strict=True) if number == 0) == 300 - len(
        place.head
    )


def test_same_seed_same_cartridge(model, corpus, tmp_path):
    options = ["--answers", "2"]
    first, second = (compact(model, corpus, tmp_path / name, *options) for name in "ab")
    assert first.digest == second.digest


def test_first_tokens_are_a_prefix(model, corpus, texts, tmp_path):
    cartridge = compact(model, corpus, tmp_path / "c", "--method", "first")
    assert cartridge.config.next_position == SLOTS and cartridge.layers[0][2] is None
    full = full_answers(model, texts[0][:, :SLOTS], texts[1])
    torch.testing.assert_close(answers(model, cartridge, texts[1]), full, rtol=0, atol=1e-4)


def test_last_tokens_keep_the_head(model, corpus, texts, tmp_path):
    cartridge = compact(model, corpus, tmp_path / "c", "--method", "last", "--system", "Hi")
    head = b"<system>Hi</system>\n<user>"
    assert cartridge.config.head == list(head)
    tokens = torch.tensor([list(head + (corpus.read_bytes() + b"\n\n")[len(head) - SLOTS :])])
    assert tokens.shape[1] == SLOTS
    full = full_answers(model, tokens, texts[1])
    torch.testing.assert_close(answers(model, cartridge, texts[1]), full, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_head_is_in_the_first_chunk(model, corpus, tmp_path):
    """A chunk of the head alone would have no reference tokens."""
    for out, size in (("a", "100"), ("b", "699"), ("c", "700")):
        cartridge = compact(model, corpus, tmp_path / out, "--system", "x" * 80, "--slots", "256", "--chunk", size)
        assert len(cartridge.config.head) > 100 and cartridge.config.next_position == len(cartridge.config.head) + 702
        assert all(bool((bias.abs().sum(-1) > 0).all()) for _, _, bias in cartridge.layers)


def test_in_front_of_everything(model, corpus, texts, tmp_path):
    cartridge = compact(model, corpus, tmp_path / "c", "--method", "first", "--place", "front")
    tokens = texts[0][:, len(b"<user>") :][:, :SLOTS]
    assert cartridge.config.head == []
    full = full_answers(model, tokens, texts[1])
    torch.testing.assert_close(answers(model, cartridge, texts[1]), full, rtol=0, atol=1e-4)


def test_a_place_is_what_a_chat_is():
    """Head, corpus, separator and words are the chat whose message is the corpus and the words."""
    tokenizer = byte_tokenizer(bos=True)
    for system in (None, "Be brief."):
        place = place_of(tokenizer, system=system)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": "A text.\n\nWhat is it?"})
        chat = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = [*place.around(place.read("A text.")), *place.asking("What is it?")]
        assert ids == list(chat.encode())
    front = place_of(tokenizer, "front")
    begun = byte_tokenizer("<bos>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", bos=True)
    assert place_of(begun, "front").asking("What?") == list(b"\n\n<user>What?")
    assert front.around(front.read("A text.")) == [257, *b"A text."] and front.head == []
    assert bytes(front.asking("What?")) == b"\n\n<user>What?</user>\n"
    plain = place_of(byte_tokenizer(template=None))
    assert plain.head == [] and bytes(plain.asking("What?")) == b"\n\nWhat?\n\n"
    joined = place_of(byte_tokenizer("{% for m in messages %}<{{ m.content | length }}>{{ m.content }}{% endfor %}"))
    with pytest.raises(ConfigError, match="changes what is before a message: use --place front"):
        joined.asking("What?")


def test_all_tokens_fit(model, corpus, texts, tmp_path):
    cartridge = compact(model, corpus, tmp_path / "c", "--slots", "1000")
    assert cartridge.config.slots == 1024
    logprobs = answers(model, cartridge, texts[1])
    torch.testing.assert_close(logprobs, full_answers(model, *texts), rtol=0, atol=5e-3)


def test_layers_without_rotation(corpus, texts, tmp_path):
    """Keys of SmolLM3's layers without rotation are not turned. Which these are its config does not say."""
    bare = write_smollm3(tmp_path / "model", vocab=258)
    byte_tokenizer().save_pretrained(bare)
    cartridge = compact(bare, corpus, tmp_path / "c", "--slots", "1000", "--answers", "2")
    assert cartridge.config.rope["unrotated_layers"] == [3]
    assert cartridge.config.slots - cartridge.config.next_position > 300
    logprobs = answers(bare, cartridge, texts[1])
    torch.testing.assert_close(logprobs, full_answers(bare, *texts), rtol=0, atol=5e-3)


def test_the_rotation_of_every_layer_is_checked(tmp_path):
    model = load(str(write_smollm3(tmp_path / "model")), "float32")
    rope = rope_of(model.config.to_dict())
    check_rotation(model, rope)
    for wrong, layer in (({"unrotated_layers": []}, 3), ({"unrotated_layers": [2, 3]}, 2), ({"rope_theta": 500.0}, 0)):
        with pytest.raises(
            ConfigError, match=f"layer {layer} of the model does not rotate queries and keys as its config says"
        ):
            check_rotation(model, rope | wrong)


def test_slots_are_rounded_up(model, corpus, tmp_path, capsys):
    assert compact(model, corpus, tmp_path / "c", "--slots", "100", "--method", "first").config.slots == 128
    assert "100 slots become 128, a multiple of 64\n" in capsys.readouterr().out


def test_heads_with_shares(model, corpus, texts, last, tmp_path, capsys):
    shares = tmp_path / "shares.json"
    shares.write_text(json.dumps({"shares": [[1, 3], [2, 2]]}))
    cartridge = compact(model, corpus, tmp_path / "c", "--kv-calibration", str(shares))
    slots = [[int((bias > -1e29).sum()) for bias in layer[2]] for layer in cartridge.layers]
    assert slots == [[64, 192], [128, 128]] and cartridge.config.slots == 192
    message = "128 slots become 192, a multiple of 64, for the head with the largest share\n"
    assert message in capsys.readouterr().out
    assert divergence(full_answers(model, *texts), answers(model, cartridge, texts[1])) < 0.6 * last


REFUSALS = {
    "short corpus": (["--method", "first", "--slots", "768"], "tokens, fewer than 768 slots: lower --slots to 704"),
    "shares of equal heads": (
        ["--method", "last", "--kv-calibration", "x"],
        "--method attention-matching: leave it out",
    ),
    "answers of no study": (
        ["--queries", "repeat-prefill", "--answers", "3"],
        "--answers is about self-study: leave it out, or --queries repeat-prefill",
    ),
    "no shares": (["--kv-calibration", "missing.json"], "missing.json has no shares.json"),
    "a former flag": (
        ["--kv-allocator", "a.json"],
        "--kv-allocator takes no file: give --kv-calibration a.json instead",
    ),
    "no room for the head": (["--slots", "64", "--system", "x" * 64], "88 tokens before the corpus"),
    "system in front": (["--place", "front", "--system", "Hi"], "has no system message before it: leave --system out"),
    "no data": (["--data", "missing.txt"], "there is no file or folder missing.txt"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(model, corpus, tmp_path, capsys, case):
    options, message = REFUSALS[case]
    arguments = ["compact", str(model), "--data", str(corpus), "--out", str(tmp_path / "c"), *options]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "c").exists()


def test_too_long_a_corpus(corpus, tmp_path, capsys):
    small = write_tiny_model(tmp_path / "model", vocab=258, max_position=750)
    byte_tokenizer().save_pretrained(small)
    assert main(["compact", str(small), "--data", str(corpus), "--out", str(tmp_path / "c"), "--slots", "64"]) == 2
    assert "cut the corpus to" in capsys.readouterr().err


def test_no_template_no_message(corpus, tmp_path, capsys):
    bare = write_tiny_model(tmp_path / "model", vocab=258)
    byte_tokenizer(template=None).save_pretrained(bare)
    for option in (["--place", "message"], ["--system", "Hi"]):
        assert main(["compact", str(bare), "--data", str(corpus), "--out", str(tmp_path / "c"), *option]) == 2
        assert f"has no chat template: leave {' '.join(option[:1])}" in capsys.readouterr().err


def test_dynamic_rotation_is_refused(model, corpus, tmp_path, capsys):
    wider_model = write_tiny_model(tmp_path / "model", vocab=258)
    raw = json.loads((wider_model / "config.json").read_text())
    raw["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (wider_model / "config.json").write_text(json.dumps(raw))
    assert main(["compact", str(wider_model), "--data", str(corpus), "--out", str(tmp_path / "c")]) == 2
    assert "'dynamic' change with the length" in capsys.readouterr().err
