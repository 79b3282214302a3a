"""`kvpop eval --task corpus`: questions that the text proves, answers after caches, and the table."""

import json
import random
import re

import pytest
import torch
from distill.byte_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM

from kvpop_vllm.cli import main
from kvpop_vllm.compaction.reference import read_corpus
from kvpop_vllm.evaluation import corpus
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.corpus import FULL, NOTHING, Corpus
from kvpop_vllm.evaluation.corpus_questions import KINDS, Question, make_questions, open_questions, verified
from kvpop_vllm.testing.models import write_tiny_model

LENGTH, SLOTS = 700, 128
PEOPLE = "Anna Boris Clara Dmitri Elena Fedor Galina Henrik Irina Jonas".split()


def story(seed: int, sentences: int = 40) -> str:
    """Return a text in which every sentence occurs once."""
    draw = random.Random(seed)
    years, houses = (draw.sample(range(1100, 1990), sentences) for _ in range(2))
    lines = [
        f"Year {year} was good, and {draw.choice(PEOPLE)} bought house {house} from {draw.choice(PEOPLE)}."
        for year, house in zip(years, houses, strict=True)
    ]
    return " ".join(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("corpus") / "model", vocab=258, seed=3)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exams(folder):
    backend = TransformersBackend(str(folder), torch.float32, LENGTH + 1024)
    return Corpus(backend, str(folder), byte_tokenizer(), 2, 0, 1)


@pytest.fixture(scope="module")
def exam_and_cache(exams):
    """Return the questions about a document and the full contexts' caches."""
    return exams.ask(0, exams.tokenizer(story(0), add_special_tokens=False)["input_ids"][:LENGTH])


def proved(question: Question, text: str) -> list[int]:
    """Return the choices that the text proves, by other means than the maker's."""
    if question.kind in ("name", "number"):
        return [i for i, choice in enumerate(question.choices) if len(text.split(question.begin + choice)) > 1]
    if question.kind == "order":
        shown = re.findall(r"^([A-D])\. (.*)$", question.prompt, re.MULTILINE)
        first = min(shown, key=lambda pair: len(text.partition(pair[1])[0]))
        return [question.choices.index(first[0])]
    quoted = question.prompt.partition('"')[2].rpartition('"')[0]
    return [int(4 * len(text.partition(quoted)[0]) / len(text))]


def test_the_text_proves_every_answer_and_no_other():
    rights = []
    for seed in range(6):
        text = story(seed)
        questions = make_questions(text, 3, str(seed))
        assert {question.kind for question in questions} == set(KINDS) and len(questions) == 3 * len(KINDS)
        assert questions == make_questions(text, 3, str(seed)) != make_questions(text, 3, "another")
        for question in questions:
            assert len(set(question.choices)) == 4 and proved(question, text) == [question.right]
        rights += [(question.kind in ("name", "number"), question.right) for question in questions]
    assert {right for _, right in rights} == set(range(4)), "the place of the right choice tells"


def test_wrong_questions_are_not_verified():
    text = story(1)
    for question in make_questions(text, 1, "0"):
        assert verified(question, text) and not verified(question._replace(right=(question.right + 1) % 4), text)
    gap = make_questions(text, 1, "0")[0]
    assert not verified(gap, f"{text} {gap.begin}{gap.choices[gap.right - 1]}."), "two choices are true"
    assert not verified(gap, f"{text} {gap.about[0]}"), "the sentence stands there twice"
    assert not verified(gap._replace(prompt=f"{gap.prompt}{gap.choices[gap.right]}"), text), "the answer is given away"


def test_a_gap_is_not_a_part_of_a_word():
    lines = [f"In the year {1000 + i} the module of {name}Config was read by {name}." for i, name in enumerate(PEOPLE)]
    for question in make_questions(" ".join(lines), 5, "0"):
        if question.kind == "name":
            assert not question.prompt.partition("____")[2].startswith("Config")


def test_a_text_without_names_has_no_question_about_them():
    plain = "all of this is written small and there is not one name in it. " * 30
    assert make_questions(plain, 3, "0") == [] and len(open_questions(plain)) == 5
    assert open_questions(story(0))[5].split()[-1].rstrip(".") in PEOPLE


def stock(folder, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities ``[S, V]`` of transformers without any code of ours."""
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return plain(torch.tensor([tokens])).logits[0].log_softmax(-1)


def chat(message: str) -> str:
    turn = [{"role": "user", "content": message}]
    return byte_tokenizer().apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


def test_full_context_and_truncation_are_transformers_own(folder, exams, exam_and_cache):
    """Caches are scored as the chats they stand for are, by transformers without any code of ours."""
    exam, full = exam_and_cache
    text = bytes(exam.tokens).decode()
    tail = text[-(SLOTS - len("<user>") - len("\n\n")) :]
    prompts = {
        FULL: lambda prompt: [*chat(f"{text}\n\n{prompt}").encode()],
        "truncation": lambda prompt: [*chat(f"{tail}\n\n{prompt}").encode()],
        NOTHING: lambda prompt: [*chat(prompt).encode()],
    }
    lost = {}
    for name, cache in {FULL: full, **{name: exams.make(name, SLOTS, exam) for name in [*prompts][1:]}}.items():
        *choices, opened = exams.measure(cache, exam)
        lost[name], total = 0.0, 0
        for question, record in zip(exam.questions, choices, strict=True):
            prompt = prompts[name](question.prompt) + [*question.begin.encode()]
            scores = []
            for choice in question.choices:
                logp = stock(folder, [*prompt, *choice.encode()])[len(prompt) - 1 : -1]
                scores.append(float(logp.gather(1, torch.tensor([[byte] for byte in choice.encode()])).mean()))
                if choice == question.choices[question.right] and "exact" in record:
                    assert record["exact"] == float(bytes(logp.argmax(-1).tolist()) == choice.encode())
            assert record["right"] == float(scores.index(max(scores)) == question.right), question
        for prompt, answer in zip(exam.opened, exam.answers, strict=True):
            best, inexact = (
                stock(folder, prompts[one](prompt) + answer)[-len(answer) - 1 : -1] for one in (FULL, name)
            )
            lost[name] += float((best.exp() * (best - inexact)).sum())
            total += len(answer)
        assert opened["tokens"] == total
        assert opened["kl"] == pytest.approx(lost[name] / total, rel=1e-3, abs=1e-5)
    assert lost["truncation"] > 1e-2 > abs(lost[FULL]) and abs(lost[NOTHING] - lost["truncation"]) > 1e-2


@pytest.mark.parametrize("name", ["snapkv", "adakv", "pyramidkv"])
def test_a_policy_keeps_what_it_holds_at_the_documents_end(exams, exam_and_cache, name):
    """Each head keeps keys and values of the document's own tokens, together as many as there are slots."""
    exam, _ = exam_and_cache
    cache = exams.make(name, SLOTS, exam)
    tokens = [*b"<user>", *exam.tokens, *b"\n\n"]
    assert cache.position == len(tokens) and cache.bytes == 2 * SLOTS * 2 * 2 * 32 * 4, "padding does not count"
    for (k, v, bias), (whole_k, whole_v) in zip(cache.layers, read_corpus(exams.model, tokens), strict=True):
        used = bias == 0
        assert int(used.sum()) == SLOTS * len(k) or name == "pyramidkv", "heads share a layer's slots"
        for head in range(len(k)):
            rows = [int((whole_k[head] - key).abs().sum(-1).argmin()) for key in k[head][used[head]]]
            assert rows == sorted(set(rows)) and rows[-8:] == list(range(len(tokens) - 8, len(tokens)))
            torch.testing.assert_close(whole_k[head][rows], k[head][used[head]])
            torch.testing.assert_close(whole_v[head][rows], v[head][used[head]])


def test_a_policy_that_makes_slots_keeps_these_and_the_last_tokens(exams, exam_and_cache):
    """Slots have keys of the document's own tokens, with values and biases of their own, and the last quarter is exact."""
    exam, _ = exam_and_cache
    cache, tokens = exams.make("policy:attention-matching", SLOTS, exam), [*b"<user>", *exam.tokens, *b"\n\n"]
    assert cache.position == len(tokens) and cache.bytes == 2 * SLOTS * 2 * 2 * 32 * 4
    near, differs = SLOTS // 4, 0
    for (k, v, bias), (whole_k, whole_v) in zip(cache.layers, read_corpus(exams.model, tokens), strict=True):
        torch.testing.assert_close(k[:, -near:], whole_k[:, -near:])
        torch.testing.assert_close(v[:, -near:], whole_v[:, -near:])
        assert not bias[:, -near:].any() and bias[:, :-near].any(1).all() and (bias.abs() < 3.001).all()
        for head in range(len(k)):
            rows = [int((whole_k[head] - key).abs().sum(-1).argmin()) for key in k[head, :-near]]
            assert rows == sorted(set(rows)) and rows[-1] < len(tokens) - near
            torch.testing.assert_close(whole_k[head][rows], k[head, :-near])
            differs += not torch.allclose(whole_v[head][rows], v[head, :-near], atol=1e-2)
    assert differs == 4
    lost = [[*exams.measure(exams.make(name, SLOTS, exam), exam)][-1]["kl"] for name in ("truncation", NOTHING)]
    assert [*exams.measure(cache, exam)][-1]["kl"] < min(lost)


def test_methods_differ_and_nothing_loses_most(exams, exam_and_cache):
    exam, full = exam_and_cache
    lost = {}
    for method in ("first", "truncation", "attention-matching", "cartridge", NOTHING):
        cache = exams.make(method, SLOTS, exam)
        assert all(k.shape[1] == (len("<user>") if method == NOTHING else SLOTS) for k, _, _ in cache.layers)
        lost[method] = [*exams.measure(cache, exam)][-1]["kl"]
    assert len(set(lost.values())) == len(lost)
    assert lost["attention-matching"] < 0.5 * lost["truncation"]
    first, trained = (exams.make(method, SLOTS, exam).layers[0][0] for method in ("first", "cartridge"))
    assert torch.equal(first[:, :1], trained[:, :1]) and not torch.allclose(first[:, 1:], trained[:, 1:])


def record(document, method, slots, kl=None, right=None, **fields):
    common = {"document": document, "unit": document, "method": method, "slots": slots, "bytes": 2**20, "build": 6.0}
    common |= {"kind": "name", "right": right} if kl is None else {"kind": "open", "kl": kl, "tokens": 10, "first": 1.0}
    return common | fields


def test_the_table_by_hand():
    records = [record(d, FULL, 0, right=1.0, exact=1.0) for d in range(8)]
    records += [record(d, FULL, 0, kl=0.0) for d in range(8)]
    records += [record(d, "truncation", 64, kl=0.4) for d in range(8)]
    records += [record(d, "snapkv", 64, right=float(d < 4), exact=0.0) for d in range(8)]
    records += [record(d, "snapkv", 64, kl=0.1 if d % 2 else 0.3) for d in range(8)]
    full, truncated, snap = corpus.summarise(records, "truncation")
    assert (full["name"], full["first s"], truncated["kl"]) == (1.0, 7.0, pytest.approx(0.4))
    assert "kl" not in full and "kl ratio" not in truncated
    assert snap["right"] == snap["name"] == 0.5 and snap["exact"] == 0.0 and snap["MiB"] == 1.0
    assert snap["kl ratio"] == pytest.approx(0.5) and snap["kl ratio interval"][0] < 0.5 < snap["kl ratio interval"][1]
    assert snap["pays"] == 1, "6 s to make, 6 s won by each question"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": story(seed), "group": str(seed)}) + "\n" for seed in range(3)))
    return path


def run(folder, data, *options) -> int:
    words = ["--task", "corpus", "--model", str(folder), "--data", str(data), "--split", "all", "--threads", "1"]
    return main(["eval", *words, "--length", str(LENGTH), "--budget", str(SLOTS), "--dtype", "float32", *options])


def test_a_compactor(folder, data, tmp_path, capsys):
    """An untrained compactor keeps tokens of the whole document, unlike truncation."""
    sizes = ["--slots", str(SLOTS), "--window", "256", "--steps", "0", "--threads", "1", "--out", str(tmp_path / "c")]
    assert main(["train-compactor", str(folder), "--data", str(data), *sizes]) == 0
    capsys.readouterr()
    still = ["--methods", "truncation", "still", "--compactor", str(tmp_path / "c"), "--rows", "1", "--questions", "1"]
    assert run(folder, data, *still, "--out", str(tmp_path / "records.jsonl")) == 0
    about, *records = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    lost = {record["method"]: record["kl"] for record in records if record["kind"] == "open"}
    (number,) = (int(row["documents"][0].rpartition(":")[2]) for row in about["run"]["rows"])
    tokens = byte_tokenizer()(json.loads(data.read_text().splitlines()[number - 1])["text"])["input_ids"][:LENGTH]
    exams = Corpus(
        TransformersBackend(str(folder), torch.float32, LENGTH + 1024), str(folder), byte_tokenizer(), 1, 0, 1
    )
    exam, full = exams.ask(0, tokens)
    places = torch.linspace(0, full.position - 1, SLOTS, dtype=torch.float64).round().long()
    spaced = [(k[:, places], v[:, places], None) for k, v in exam.full]
    *_, expected = exams.measure(full._replace(layers=spaced), exam)
    assert lost["still"] == pytest.approx(expected["kl"], rel=0.1) and 0 < lost["still"] < lost[NOTHING]


@pytest.mark.slow
def test_the_command(folder, data, tmp_path, capsys):
    """It prints a line for each method, and its records say how to repeat it."""
    out = tmp_path / "records.jsonl"
    assert run(folder, data, "--rows", "2", "--questions", "1", "--out", str(out)) == 0
    printed = capsys.readouterr()
    assert [line.split("  ")[0] or line.split()[0] for line in printed.out.splitlines()][0] == "slots"
    for method in (FULL, NOTHING, *corpus.DEFAULT_METHODS):
        assert sum(method in line for line in printed.out.splitlines()) == 1
    about, *records = map(json.loads, out.read_text().splitlines())
    assert about["run"]["options"]["budget"] == [SLOTS] and len(about["run"]["rows"]) == 2
    kinds = [r["kind"] for r in records if r["document"] == 1 and r["method"] == "snapkv"]
    assert kinds == [*KINDS, "open"] and "intervals need at least 8 documents" in printed.err
    assert all(len(row["documents"]) == 1 for row in about["run"]["rows"]), "a document is not joined with another"
    assert {r["bytes"] for r in records if r["slots"]} == {2 * SLOTS * 2 * 2 * 32 * 4}, "2 layers, 2 heads, D = 32"


@pytest.mark.parametrize(
    "options, text",
    [
        (["--methods", "h2o"], "--methods h2o makes no cache of a document: choose from truncation, first"),
        (["--methods", "first", "first"], "--methods names first twice"),
        (["--against", "h2o"], "--against h2o is not compared: choose from truncation, snapkv"),
        (["--methods", "still"], "--methods still and --compactor DIR go together"),
        (["--methods", "still", "--compactor", "missing"], "no compactor at 'missing'"),
        (["--policies", "h2o"], "--policies says nothing to --task corpus"),
        (["--window", "8"], "--window says nothing to --task corpus"),
        (["--length", "100"], "128 slots keep all of 100 tokens: lower --budget or raise --length"),
        (["--length", "9000"], "positions, 1024 for questions: lower --length to"),
        (["--length", "400", "500"], "--task corpus has documents of one length"),
    ],
)
def test_refused(folder, data, capsys, options, text):
    assert run(folder, data, *options) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert text in error[-1], error
