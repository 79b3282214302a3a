"""Trained cartridges: the teacher, the loss, what is trained, runs that are stopped, and refusals."""

import json
import math

import pytest
import torch
from distill.byte_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from kvpop_vllm.cli import main
from kvpop_vllm.compaction.cartridge import read_cartridge, turned
from kvpop_vllm.compaction.cartridge_training import CacheTrainer, Training
from kvpop_vllm.compaction.conversations import TOP, Conversation, read_conversations, sparse_teacher
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.compaction.sampling import TransformersSampler
from kvpop_vllm.compaction.trained_cache import TrainedCache, losses, packs
from kvpop_vllm.distill import training_loop
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.testing.models import write_tiny_model

SLOTS = 64
RUN = ["--method", "cartridge", "--slots", str(SLOTS), "--backend", "transformers", "--threads", "1", "--chunk", "200"]
SMALL = ["--conversations", "36", "--steps", "5", "--batch", "3", "--save-every", "2"]


def write_model(folder, **options):
    """Write a tiny model with a tokenizer of bytes."""
    write_tiny_model(folder, vocab=258, seed=3, **options)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("trained") / "model")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    letters = torch.randint(97, 123, (60, 5), generator=torch.Generator().manual_seed(0)).tolist()
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(bytes(row).decode() for row in letters))
    return path


def compact(model, corpus, out, *options, code=0):
    assert main(["compact", str(model), "--data", str(corpus), "--out", str(out), *RUN, *options]) == code


@pytest.fixture(scope="module")
def finished(model, corpus, tmp_path_factory):
    """Return the folder of a run that nothing has stopped."""
    out = tmp_path_factory.mktemp("whole") / "c"
    compact(model, corpus, out, *SMALL)
    return out


@pytest.fixture(scope="module")
def base(model):
    return load_model(model, torch.float32).eval().requires_grad_(False)


def stock_logp(model, tokens, past=None):
    """Return log-probabilities ``[S, V]`` of transformers without any code of ours."""
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    with torch.no_grad():
        return plain(torch.tensor([tokens]), past_key_values=past).logits[0].log_softmax(-1)


def test_sparse_teacher_by_hand():
    half, quarter = math.log(0.5), math.log(0.25)
    conversation = Conversation(
        [0, 1], "use", "?", [1], [4, 9], [[7, 4], [5, 6, 9]], [[half, quarter], [quarter, quarter, half]]
    )
    ids, chances, unlisted_chance = sparse_teacher(conversation)
    assert ids.tolist() == [[7, 4, 7], [5, 6, 9]]
    torch.testing.assert_close(chances, torch.tensor([[0.5, 0.25, 0], [0.25, 0.25, 0.5]]))
    torch.testing.assert_close(unlisted_chance, torch.tensor([0.25, 0.0]), rtol=0, atol=1e-6)


def test_stored_candidates_are_those_of_the_teacher_after_the_chunk(model, corpus, finished):
    """Each position has the TOP most likely tokens, and the sampled one even if it is none of them."""
    text, outside = list(corpus.read_bytes()), 0
    rows = read_conversations(finished / "run" / "conversations.jsonl")
    assert len(rows) == 36 and len({conversation.kind for conversation in rows}) == 5
    assert {conversation.chunk[1] - conversation.chunk[0] for conversation in rows} <= set(range(50, 201))
    for conversation in rows[:3] + rows[-2:]:
        teacher_prompt = (
            b"<user>"
            + bytes(text[slice(*conversation.chunk)])
            + b"\n\n"
            + conversation.question.encode()
            + b"</user>\n"
        )
        assert bytes(conversation.prompt) == conversation.question.encode() + b"</user>\n"
        logp = stock_logp(model, list(teacher_prompt) + conversation.answer)[-len(conversation.answer) - 1 : -1]
        for position, (token, ids, values) in enumerate(
            zip(conversation.answer, conversation.top, conversation.logp, strict=True)
        ):
            torch.testing.assert_close(torch.tensor(values), logp[position, ids], rtol=0, atol=1e-4)
            assert token in ids and set(ids[:TOP]) == set(logp[position].topk(TOP).indices.tolist())
            outside += len(ids) > TOP
    assert outside


def test_loss_is_that_of_transformers_after_the_slots(model, corpus, finished, base):
    """Conversations in one pack see the cache and themselves alone, and positions go on at P."""
    pack = read_conversations(finished / "run" / "conversations.jsonl")[:3]
    layers = read_corpus(base, list(corpus.read_bytes())[:SLOTS])
    total, entropy = losses(base, [(k, v, None) for k, v in layers], pack, SLOTS)
    expected = surprise = 0.0
    for conversation in pack:
        past = DynamicCache()
        for i, (k, v) in enumerate(layers):
            past.update(k.unsqueeze(0), v.unsqueeze(0), i)
        logp = stock_logp(model, conversation.prompt + conversation.answer, past)[len(conversation.prompt) - 1 : -1]
        for token_logp, ids, values in zip(logp, conversation.top, conversation.logp, strict=True):
            chances = torch.tensor(values).exp()
            unlisted = torch.ones(len(token_logp), dtype=torch.bool).index_fill(0, torch.tensor(ids), False)
            unlisted_chance, found_rest = 1 - chances.sum(), token_logp[unlisted].exp().sum()
            expected -= float((chances * token_logp[ids]).sum() + unlisted_chance * found_rest.log())
            surprise -= float((chances * chances.log()).sum() + unlisted_chance * unlisted_chance.log())
    assert float(total) == pytest.approx(expected, rel=1e-4) and entropy == pytest.approx(surprise, rel=1e-4)
    sizes = [len(conversation.prompt) + len(conversation.answer) for conversation in pack]
    assert list(map(len, packs(pack, sizes[0] + sizes[1]))) == [2, 1] and list(map(len, packs(pack, 1))) == [1, 1, 1]


def test_the_cache_that_the_teacher_has_is_where_the_gradient_is_nothing(model, corpus, finished, base):
    """With the chunk itself as the cache, the divergence is 0 and so is the gradient, however much mass TOP tokens leave out."""
    conversation = read_conversations(finished / "run" / "conversations.jsonl")[0]
    teacher_prompt = b"<user>" + corpus.read_bytes()[slice(*conversation.chunk)] + b"\n\n"
    layers = [
        (k.clone().requires_grad_(), v.clone().requires_grad_(), None)
        for k, v in read_corpus(base, list(teacher_prompt))
    ]
    total, entropy = losses(base, layers, [conversation], len(teacher_prompt))
    total.backward()
    assert float(total.detach()) == pytest.approx(entropy, rel=1e-4)
    assert sparse_teacher(conversation)[2].max() > 0.01
    worst = max(float(part.grad.norm()) for layer in layers for part in layer[:2])
    shifted = [(k.detach() * 1.05, v.detach().requires_grad_(), None) for k, v, _ in layers]
    losses(base, shifted, [conversation], len(teacher_prompt))[0].backward()
    assert worst < 0.02 * max(float(v.grad.norm()) for _, v, _ in shifted)


def first_slots(base, corpus) -> list:
    return [(k, v, None) for k, v in read_corpus(base, list(corpus.read_bytes())[:SLOTS])]


def test_only_slots_after_the_first_are_trained(corpus, finished, base, tmp_path):
    start = first_slots(base, corpus)
    rows = read_conversations(finished / "run" / "conversations.jsonl")[:4]
    cache = TrainedCache(start)
    CacheTrainer(base, cache, rows, tmp_path, Training(4, 2, 2), SLOTS, quiet=True).run()
    assert all(parameter.grad is None for parameter in base.parameters())
    for (k, v, _), trained_layer in zip(start, cache.layers(), strict=True):
        for before, after in ((k, trained_layer[0]), (v, trained_layer[1])):
            assert torch.equal(before[:, 0], after[:, 0])
            assert ((before != after)[:, 1:].float().mean((0, 2)) > 0.9).all()


def test_few_conversations_are_learned(corpus, finished, base, tmp_path):
    rows = read_conversations(finished / "run" / "conversations.jsonl")[:2]
    cache = TrainedCache(first_slots(base, corpus))
    trainer = CacheTrainer(base, cache, rows, tmp_path, Training(2, 60, 2, lr=0.2), SLOTS, quiet=True)
    trainer.run()
    kl = [json.loads(line)["kl"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(kl) == 60 and 0 <= kl[-1] < 0.4 * kl[0]


def test_run_that_was_stopped_equals_a_whole_one(model, corpus, finished, tmp_path, monkeypatch):
    """It is stopped while conversations are made, in a step, and by an end of the process between both."""
    out, path = tmp_path / "c", tmp_path / "c" / "run" / "conversations.jsonl"
    sample, step = TransformersSampler.__call__, CacheTrainer.step

    def stop_sampling(self, prefix, prompts, new, seeds):
        if path.exists() and path.stat().st_size:
            raise KeyboardInterrupt
        return sample(self, prefix, prompts, new, seeds)

    def stop_step(self, number):
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number)

    for owner, name, stop in ((TransformersSampler, "__call__", stop_sampling), (CacheTrainer, "step", stop_step)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, stop)
            compact(model, corpus, out, *SMALL)
        assert not (out / "kvpop_cartridge.json").exists()
        if name == "__call__":
            assert len(read_conversations(path)) == 32
            path.write_text(path.read_text() + '{"chunk": [0, ')
    with monkeypatch.context() as patch:
        patch.setattr(TransformersSampler, "__call__", None)  # all conversations are there
        compact(model, corpus, out, *SMALL)
    assert path.read_bytes() == (finished / "run" / "conversations.jsonl").read_bytes()
    assert read_cartridge(out).digest == read_cartridge(finished).digest
    assert (out / "run" / "metrics.jsonl").read_bytes() == (finished / "run" / "metrics.jsonl").read_bytes()


def test_written_folder(model, corpus, finished, capsys):
    cartridge = read_cartridge(finished)
    assert (cartridge.config.slots, cartridge.config.next_position, cartridge.config.method) == (
        SLOTS,
        SLOTS,
        "cartridge",
    )
    assert cartridge.layers[0][2] is None and cartridge.config.provenance["arguments"]["steps"] == 5
    assert {path.name for path in finished.iterdir()} == {"run", "kvpop_cartridge.json", "kvpop_cartridge.safetensors"}
    assert {"metrics.jsonl", "run.json", "training.png"} <= {path.name for path in (finished / "run").iterdir()}
    compact(model, corpus, finished, *SMALL)  # a finished run is finished
    assert read_cartridge(finished).digest == cartridge.digest
    assert capsys.readouterr().out.startswith(f"{SLOTS} slots for 359 tokens, loss ")


def test_without_training_it_is_its_start(model, corpus, tmp_path):
    """The start is the first tokens, of the corpus or of another text."""
    other_text = tmp_path / "other.txt"
    other_text.write_text(corpus.read_text()[::-1])
    for data, options in ((corpus, []), (other_text, ["--init", str(other_text)])):
        out = tmp_path / f"c{len(options)}"
        compact(model, corpus, out, "--steps", "0", *options)
        first = tmp_path / f"f{len(options)}"
        arguments = ["compact", str(model), "--data", str(data), "--out", str(first), "--threads", "1"]
        assert main([*arguments, "--method", "first", "--slots", str(SLOTS)]) == 0
        cartridge, expected = read_cartridge(out), read_cartridge(first)
        assert cartridge.config.next_position == expected.config.next_position
        for layer, expected_layer in zip(cartridge.layers, expected.layers, strict=True):
            assert torch.equal(layer[0], expected_layer[0]) and torch.equal(layer[1], expected_layer[1])


def test_it_starts_from_another_cartridge(model, corpus, tmp_path):
    """Keys are turned so that own tokens go on at P, biases are kept, and all slots but the first are trained."""
    start = ["compact", str(model), "--data", str(corpus), "--slots", str(SLOTS), "--threads", "1", "--out"]
    assert main([*start, str(tmp_path / "am")]) == 0
    before, length = read_cartridge(tmp_path / "am"), len(b"<user>" + corpus.read_bytes() + b"\n\n")
    assert before.config.next_position == length
    for steps in ("0", "2"):
        options = ["--conversations", "4", "--batch", "2", "--steps", steps, "--init", str(tmp_path / "am")]
        compact(model, corpus, tmp_path / steps, *options)
        cartridge = read_cartridge(tmp_path / steps)
        assert cartridge.config.next_position == SLOTS
        for (k, v, bias), (own_k, own_v, own_bias) in zip(before.layers, cartridge.layers, strict=True):
            assert torch.equal(bias, own_bias) and bias.std() > 0
            same = (
                torch.isclose(own_v, v, atol=1e-6),
                torch.isclose(own_k, turned(k, SLOTS - length, cartridge.config.rope), atol=1e-5),
            )
            assert all(part[:, :1].all() and part[:, 1:].all() == (steps == "0") for part in same)


def test_a_start_of_another_place_is_refused(model, corpus, tmp_path, capsys):
    first = ["compact", str(model), "--data", str(corpus), "--slots", str(SLOTS), "--method", "first", "--threads", "1"]
    for name, place in (("front", ["--place", "front"]), ("brief", ["--system", "Be brief."])):
        assert main([*first, "--out", str(tmp_path / name), *place]) == 0
        init = ["--init", str(tmp_path / name), "--steps", "0"]
        compact(model, corpus, tmp_path / "c", *init, code=2)
        assert "stands in another place: give the --place and --system" in capsys.readouterr().err
        compact(model, corpus, tmp_path / f"{name} again", *init, *place)
        assert read_cartridge(tmp_path / f"{name} again").config.head == read_cartridge(tmp_path / name).config.head


def test_model_without_a_chat_template(corpus, tmp_path):
    model = write_tiny_model(tmp_path / "model", vocab=258)
    byte_tokenizer(template=None).save_pretrained(model)
    compact(model, corpus, tmp_path / "c", "--conversations", "2", "--batch", "1", "--steps", "1")
    (conversation, _) = read_conversations(tmp_path / "c" / "run" / "conversations.jsonl")
    assert bytes(conversation.prompt).decode() == f"\n\n{conversation.question}\n\n"


@pytest.mark.slow
def test_engine_samples_with_the_teacher_of_transformers(model, corpus):
    from kvpop_vllm.vllm_glue.extras.self_study import engine_sampler

    prefix, prompts = list(corpus.read_bytes()), [[10, 65, 66], [10, 67, 68, 69, 70]]
    with engine_sampler(str(model), "float32", 1024, {256}) as sample:
        answers = sample(prefix, prompts, 12, [0, 1])
    for prompt, answer in zip(prompts, answers, strict=True):
        logp = stock_logp(model, prefix + prompt + answer.tokens)[-len(answer.tokens) - 1 : -1]
        for position, (token, ids, values) in enumerate(zip(*answer, strict=True)):
            assert token in ids and TOP <= len(ids) <= TOP + 1
            torch.testing.assert_close(torch.tensor(values), logp[position, ids], rtol=0, atol=1e-3)


REFUSALS = {
    "short corpus": (["--slots", "384"], "tokens, fewer than 384 slots: lower --slots to 320"),
    "rate": (["--lr", "0"], "--lr 0.0 is not a number above 0"),
    "large batch": (["--batch", "9", "--conversations", "8"], "a batch of 9 needs as many conversations"),
    "options of matching": (["--keys", "omp"], "--keys is of --method attention-matching: leave it out"),
    "off policy": (["--no-on-policy"], "--no-on-policy is of --method attention-matching"),
    "shares": (["--kv-calibration", "shares.json"], "--method attention-matching: leave it out"),
    "options of training": (["--method", "last", "--steps", "3"], "--steps is of --method cartridge"),
    "backend of another method": (["--method", "first"], "--backend is of --method cartridge"),
    "a start of another size": (["--init", "START", "--slots", "128"], "has 64 slots, not 128: set --slots to as many"),
    "no text": (["--init", "missing.txt"], "there is no file or folder missing.txt"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(model, corpus, finished, tmp_path, capsys, case):
    options, message = REFUSALS[case]
    options = [str(finished) if option == "START" else option for option in options]
    capsys.readouterr()
    compact(model, corpus, tmp_path / "c", *options, code=2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "c").exists()


def test_other_runs_are_refused(model, corpus, finished, tmp_path, capsys):
    compact(model, corpus, finished, *SMALL, "--lr", "0.1", code=2)
    assert "holds a run with lr = 0.02, not 0.1: choose another --out" in capsys.readouterr().err
    (tmp_path / "letter.txt").write_text("mine")
    compact(model, corpus, tmp_path, *SMALL, code=2)
    assert "holds something already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_chunks_fit_into_the_positions(corpus, tmp_path, capsys):
    model = write_model(tmp_path / "model", max_position=1100)
    compact(model, corpus, tmp_path / "c", *SMALL, code=2)
    assert "1032 are for conversations: lower --chunk to 68" in capsys.readouterr().err
    compact(model, corpus, tmp_path / "c", *SMALL, "--slots", "128", code=2)
    assert "lower --slots to 68" in capsys.readouterr().err


def test_rate_rises_and_falls():
    cache = TrainedCache([(torch.zeros(1, 4, 2), torch.zeros(1, 4, 2), None)])
    trainer = CacheTrainer(None, cache, [], None, Training(steps=40, lr=1.0), 4)
    rates = [trainer.rate(step) for step in range(40)]
    assert (
        rates[:3] == [0.5, 1.0, 1.0]
        and rates[-1] == pytest.approx(training_loop.END)
        and sorted(rates[2:])[::-1] == rates[2:]
    )
