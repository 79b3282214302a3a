"""Each retrieval example can be answered from its prompt alone, by a reader that does not know its origin."""

import re
from collections import Counter

import pytest

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.examples import KINDS, NEW_TOKENS, credit, make_example
from kvpop_vllm.evaluation.retrieval import answers, make_examples

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
LETTERS = "abcdefghij"
SENTENCES = [
    f"Sentence {i} tells of {''.join(LETTERS[int(d)] for d in f'{i * 7919 % 100000:05}')}." for i in range(2000)
]


@pytest.fixture(params=[None, TEMPLATE], ids=["plain", "chat"])
def tokenizer(request, tokenizer):
    tokenizer.chat_template = request.param
    return tokenizer


def make(tokenizer, kind, length=2400, seed="0", depth=0.3, digits=4):
    return make_example(kind, tokenizer, SENTENCES, length, seed=seed, depth=depth, digits=digits)


def read_needle(text):
    (key,) = set(re.findall(r"What is the special magic number for (\S+) mentioned", text))
    return re.findall(rf"One of the special magic numbers for {key} is: (\d+)\.", text)


def read_variables(text):
    question = text.split("Question:")[-1]
    value = re.search(r"assigned the value (\d+)", question).group(1)
    body = text.split("Memorize and track")[-1]
    values = {name: to for name, to in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", body)}

    def end(name):
        return end(values[name]) if name in values else name

    return [name for name in values if end(name) == value]


def read_words(text):
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", text))
    assert set(counts.values()) == {10, 1}
    return [word for word, count in counts.items() if count == 10]


READERS = {"needle": read_needle, "multikey": read_needle, "variables": read_variables, "words": read_words}


@pytest.mark.parametrize("length", [1500, 2400])
@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_in_the_prompt(tokenizer, kind, length):
    example = make(tokenizer, kind, length)
    text = tokenizer.decode(example.prompt)
    assert 0.9 * length <= len(example.prompt) <= length
    answer = READERS[kind](text)
    assert sorted(answer) == sorted(example.expected) and len(set(answer)) == {"variables": 5, "words": 10}.get(kind, 1)
    assert credit(example.expected, " ".join(answer)).exact == 1
    assert example.chat == (tokenizer.chat_template is not None)
    begun = {"variables": "they are:", "words": "list are:"}.get(kind, "text is")
    assert text.endswith(begun) and text.startswith("<user>") == example.chat
    if example.chat:
        question, answer = text.split("<model>")
        assert question.rstrip().endswith(("?", "above.")) and not answer.startswith(" ")


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(tokenizer, kind):
    assert make(tokenizer, kind) == make(tokenizer, kind)
    assert make(tokenizer, kind, seed="1").expected != make(tokenizer, kind).expected


def test_needles_lie_at_their_depth_among_whole_sentences(tokenizer):
    for depth in (0.0, 0.25, 0.75, 1.0):
        text = tokenizer.decode(make(tokenizer, "needle", depth=depth).prompt)
        before, after = re.split(r"One of the special magic numbers for \S+ is: \d+\. ?", text.split("\n")[1])
        inside = [part.count("Sentence") for part in (before, after)]
        assert abs(inside[0] / sum(inside) - depth) < 0.05
        numbers = [int(n) for n in re.findall(r"Sentence (\d+)", text)]
        assert all(b == (a + 1) % len(SENTENCES) for a, b in zip(numbers, numbers[1:], strict=False))
    text = tokenizer.decode(make(tokenizer, "multikey").prompt)
    needles = re.findall(r"special magic numbers for (\S+) is: (\d+)", text)
    assert len(set(needles)) == len({k for k, _ in needles}) == len({v for _, v in needles}) == 4


def test_what_cannot_be_made_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="the text is too short for 'variables' at 200000 tokens, it fills"):
        make(tokenizer, "variables", 200000)


@pytest.mark.parametrize(
    "expected, answer, exact, partial",
    [
        (("1234",), " 1234.", 1, 1),
        (("1234",), "It is 99 or 1,234", 1, 1),
        (("1234",), "12345", 0, 4 / 5),
        (("1234",), "51234, none", 0, 0),
        (("1234",), "", 0, 0),
        (("ABCDE", "FGHIJ"), "abcde, fghijk", 0, 1 / 2),
        (("ABCDE", "FGHIJ"), "FGHIJ ABCDE", 1, 1),
        (("1234", "word"), "a word", 0, 1 / 2),
    ],
)
def test_credit(expected, answer, exact, partial):
    credits = credit(expected, answer)
    assert (credits.exact, credits.partial) == (exact, pytest.approx(partial))


def test_answers_are_records_of_every_example(tokenizer):
    """A reader that looks the answer up in the prompt gets one record per example."""
    examples = make_examples(["needle", "words"], tokenizer, SENTENCES, 2000, 3, seed=1, digits=4)
    assert [e.depth for e in examples[:3]] == pytest.approx([1 / 6, 3 / 6, 5 / 6])
    assert all(len(e.prompt) + NEW_TOKENS[e.kind] <= 2000 for e in examples)
    calls = []

    class Reader:
        def generate(self, prompts, new, stop):
            calls.append((new, stop))
            text = tokenizer.decode(prompts[0])
            kind = "words" if "common words" in text else "needle"
            return [tokenizer(" " + READERS[kind](text)[0], add_special_tokens=False)["input_ids"]]

    records = list(answers(Reader(), tokenizer, examples))
    assert [(r["kind"], r["example"]) for r in records] == [(k, i) for k in ("needle", "words") for i in range(3)]
    assert [(r["exact"], r["partial"]) for r in records] == [(1, 1)] * 3 + [(0, pytest.approx(1 / 10))] * 3
    assert calls == [(NEW_TOKENS[e.kind], {tokenizer.eos_token_id}) for e in examples]
    assert records[0]["tokens"] == len(examples[0].prompt) and records[0]["expected"] == list(examples[0].expected)
