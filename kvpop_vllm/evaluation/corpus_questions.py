"""Questions about a text that are made from it by rules, so that their answers need no one to write them.

``name`` and ``number`` take a sentence apart: the model is to write it as it stands in the text, and the gap is a name
or a number. The other choices are names or numbers of the same text. ``order`` asks which of four sentences comes
first, ``section`` in which quarter of the text a sentence stands. Their choices are letters.
"""

import random
import re
from collections import Counter
from typing import NamedTuple

KINDS = "name", "number", "order", "section"
GAPS = "name", "number"
"""Kinds whose answer stands in the text, so that it can also be judged without choices."""
CHOICES = 4
LETTERS = "ABCD"
SHORTEST, LONGEST = 40, 240
"""Characters of a sentence that is asked about."""
BEFORE = 20
"""Fewest characters of a sentence before its gap."""
# not at the beginning of a sentence, where any word may have a capital
NAME = re.compile(r"(?<=[a-z,;] )(?!I\b)[A-Z][a-z]+(?: [A-Z][a-z]+)*(?![\w-])")
NUMBER = re.compile(r"(?<= )[1-9][0-9]+(?![0-9.,]*[0-9])\b")
OPEN = (
    "What is the text above about? Answer in a few sentences.",
    "Name the most important people or things in the text above, and say what they do.",
    "What does the first half of the text above say?",
    "How does the text above end?",
    "What would a reader of the text above learn from it?",
    "Explain in your own words what the text above says about {0}.",
    "Which part does {1} play in the text above?",
    "Tell a friend about {2}, from the text above alone.",
)
"""Questions whose answers are compared with those from the full text. ``{i}`` is its i-th most frequent name."""


class Question(NamedTuple):
    """Question with its choices.

    Attributes:
        kind: of :data:`KINDS`.
        prompt: what the model is asked after the text.
        begin: beginning of its answer, which the choices complete.
        choices: different completions.
        right: index of the one that is true.
        about: sentence of a gap or of ``section``, sentences of ``order``. What :func:`verified` looks for.
    """

    kind: str
    prompt: str
    begin: str
    choices: tuple[str, ...]
    right: int
    about: tuple[str, ...]


def make_questions(text: str, per_kind: int, seed: str) -> list[Question]:
    """Return at most ``per_kind`` questions of every kind about a text, fewer if it has few sentences or names."""
    draw, questions = random.Random(seed), []
    sentences = sentences_of(text)
    for kind in KINDS:
        candidates = _gaps(kind, text, sentences, draw) if kind in GAPS else _placed(kind, text, sentences, draw)
        questions += [question for question in candidates if verified(question, text)][:per_kind]
    return questions


def open_questions(text: str) -> list[str]:
    """Return the questions of :data:`OPEN` with the most frequent names of a text. Those without a name are left out."""
    names = [name for name, _ in Counter(NAME.findall(text)).most_common()]
    # -1 of a question without a name lets it pass below
    fields = [
        int(field) for field in (re.findall(r"\{(\d)\}", template) or [-1] for template in OPEN) for field in field
    ]
    return [template.format(*names) for template, field in zip(OPEN, fields, strict=True) if field < len(names)]


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text, on one line each, that occur once and are neither short nor long."""
    sentences = re.split(r"(?<=[.!?])\s+|\n{2,}", text)
    counts = Counter(sentences)
    return [part for part in sentences if counts[part] == 1 and SHORTEST <= len(part) <= LONGEST and "\n" not in part]


def _gaps(kind: str, text: str, sentences: list[str], draw: random.Random) -> list[Question]:
    """Return a question for each sentence that has a name or number after its first words, in random order."""
    pattern, questions = {"name": NAME, "number": NUMBER}[kind], []
    matches = sorted(set(pattern.findall(text)))
    for sentence in draw.sample(sentences, len(sentences)):
        gap = next((m for m in pattern.finditer(sentence) if m.start() >= BEFORE), None)
        wrong = [match for match in matches if gap and match != gap[0]]
        if len(wrong) < CHOICES - 1:
            continue
        choices = [gap[0], *draw.sample(wrong, CHOICES - 1)]
        draw.shuffle(choices)
        begin, end = sentence[: gap.start()].rstrip(), sentence[gap.end() :]
        prompt = f'Fill the gap as it stands in the text above: "{begin} ____{end}"'
        completions = tuple(f" {choice}" for choice in choices)
        questions.append(Question(kind, prompt, begin, completions, choices.index(gap[0]), (sentence,)))
    return questions


def _placed(kind: str, text: str, sentences: list[str], draw: random.Random) -> list[Question]:
    """Return questions about where sentences stand, of which no sentence is in two."""
    quarters: list[list[str]] = [[] for _ in range(CHOICES)]
    for sentence in draw.sample(sentences, len(sentences)):
        quarters[_quarter(sentence, text)].append(sentence)
    questions = []
    # as many questions as the quarter of the fewest sentences allows
    for four in zip(*quarters, strict=False):
        shown = draw.sample(four, CHOICES)
        if kind == "order":
            listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, shown, strict=True))
            prompt = f"Which of these sentences comes first in the text above?\n{listed}\nAnswer with its letter alone."
            # four is in the order of the text, so that its first sentence is the answer
            questions.append(Question(kind, prompt, "", tuple(LETTERS), shown.index(four[0]), tuple(shown)))
        else:
            prompt = (
                f'Where does this sentence stand in the text above? "{shown[0]}"\nA. In the first quarter\nB. In the second'
                " quarter\nC. In the third quarter\nD. In the last quarter\nAnswer with the letter alone."
            )
            questions.append(Question(kind, prompt, "", tuple(LETTERS), four.index(shown[0]), (shown[0],)))
    return questions


def _quarter(sentence: str, text: str) -> int:
    return CHOICES * text.index(sentence) // len(text)


def verified(question: Question, text: str) -> bool:
    """Return whether the text proves the right choice and no other, and the prompt of a gap names none of them."""
    if any(text.count(sentence) != 1 for sentence in question.about):
        return False
    if question.kind in GAPS:
        if any(re.search(rf"\b{re.escape(choice.strip())}\b", question.prompt) for choice in question.choices):
            return False
        proved = [f"{question.begin}{choice}" in text for choice in question.choices]
    elif question.kind == "order":
        places = [text.find(passage) for passage in question.about]
        proved = [place == min(places) for place in places]
    else:
        place = text.find(question.about[0]) / len(text)
        proved = [i / CHOICES <= place < (i + 1) / CHOICES for i in range(CHOICES)]
    different = len(set(question.choices)) == CHOICES == len(question.choices)
    return different and [i for i, proof in enumerate(proved) if proof] == [question.right]
