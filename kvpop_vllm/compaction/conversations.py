"""Self-study: conversations of a model about a corpus, with the teacher's most likely tokens, in a file.

Each conversation is about a chunk of the corpus, which the model reads where the corpus will stand. A seed prompt after
it makes the model write a question or an instruction. The answer to that is sampled after the same chunk
(arXiv:2506.06266, section 4).

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from kvpop_vllm.compaction.prompt_place import Place
from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import json_lines, whole_lines, write_whole

SEEDS = {
    "summary": (
        "Write one instruction that asks for a summary of a part of the text above. Name the part. Write nothing else.",
        "Which part of the text above should be summarised? Write the request for it as one sentence.",
        "Ask for a short overview of one topic of the text above, in one sentence.",
    ),
    "question": (
        "Write one question that only a reader of the text above can answer. Write nothing else.",
        "Ask one question about a name, a number or a date in the text above.",
        "Write one question about why or how something in the text above happens. Write only the question.",
    ),
    "use": (
        "For which task could someone need the text above? Write that task as one instruction to an assistant.",
        "Think of a user who needs the text above for work. Write one message of that user to an assistant.",
        "Write one practical problem that the text above helps to solve, as a request in one sentence.",
    ),
    "structure": (
        "Write one instruction to put a part of the information in the text above into a list. Name the part.",
        "Ask for some facts of the text above in JSON or as a table. Say which facts, in one sentence.",
        "Write one instruction to sort or group things that the text above mentions. Write nothing else.",
    ),
    "creative": (
        "Write one instruction to quote a part of the text above word for word. Say which part.",
        "Write one creative task that starts from a detail of the text above, as an instruction in one sentence.",
        "Ask an assistant to continue or to rewrite a passage of the text above. Say which passage.",
    ),
}
"""Prompts that make the model write a question or an instruction, by kind. Kinds take turns."""
PLAIN = {
    "summary": "Summarise the text above.",
    "question": "What is the text above about?",
    "use": "What is the text above useful for?",
    "structure": "List the facts in the text above.",
    "creative": "Quote the text above.",
}
"""Instruction of a kind where the model has written none."""
QUESTION, ANSWER = 96, 256
"""Most tokens of a question and of an answer."""
ROOM = 1024
"""Positions that a conversation may take after a chunk or a cartridge."""
LONGEST = 2048
"""Most tokens of a chunk by default. The fewest are a quarter."""
ROUND = 32
"""Conversations that are about one chunk, and are made and stored together."""
TOP = 20
"""Tokens whose log-probabilities are stored at each position of an answer."""
TEMPERATURE = 0.7


class Answer(NamedTuple):
    """Sampled tokens, with the sampled one among the candidates of each position.

    Attributes:
        tokens: ids, with the token that ended the answer.
        top: ids of the candidates at each position, TOP or one more.
        logp: their log-probabilities at temperature 1.
    """

    tokens: list[int]
    top: list[list[int]]
    logp: list[list[float]]


class Sampler(Protocol):
    """Function that samples the model's answers after one prefix."""

    def __call__(
        self, prefix: Sequence[int], prompts: Sequence[list[int]], new: int, seeds: Sequence[int]
    ) -> list[Answer]:
        """Return an answer to each prompt, at temperature TEMPERATURE.

        Args:
            prefix: ids that all prompts follow.
            prompts: ids of each.
            new: most tokens of an answer.
            seeds: seed of each answer.
        """


@dataclass(frozen=True)
class Conversation:
    """One line of the file.

    Attributes:
        chunk: first token and the one after the last of the chunk in the corpus.
        kind: kind of the seed prompt.
        question: what the model was asked.
        prompt: ids that the student reads after its cache, without the chunk, up to where the answer begins.
        answer: ids of the answer.
        top: see :class:`Answer`.
        logp: see :class:`Answer`.
    """

    chunk: list[int]
    kind: str
    question: str
    prompt: list[int]
    answer: list[int]
    top: list[list[int]]
    logp: list[list[float]]


def sparse_teacher(conversation: Conversation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the candidates of A answer tokens, their probabilities, and that of all other tokens together.

    Returns:
        ids: ``[A, K]``. Positions with fewer candidates are filled with their first.
        chances: ``[A, K]`` probabilities, 0 where filled.
        rest: ``[A]``, 1 less their sum.
    """
    width = max(map(len, conversation.top))
    ids = torch.tensor([row + row[:1] * (width - len(row)) for row in conversation.top])
    logp = [torch.tensor(row) for row in conversation.logp]
    # filled places have probability 0
    chances = torch.nn.utils.rnn.pad_sequence(logp, True, padding_value=-torch.inf).exp()
    # stored log-probabilities are rounded, so that their sum may exceed 1
    return ids, chances, (1 - chances.sum(-1)).clamp_min(0)


def chunk_tokens(chunk: int | None, tokens: int, slots: int, positions: int | None, room: int = ROOM) -> int:
    """Return the most tokens of a chunk.

    Args:
        chunk: as asked for, or None.
        tokens: T.
        slots: P.
        positions: positions of the model, or None.
        room: positions for a conversation, and for what stands around a chunk.
    """
    left = (positions or 1 << 30) - room
    if slots > left:
        raise ConfigError(
            f"the model has {positions} positions, and {room} are for conversations: lower --slots to {max(0, left)}"
        )
    longest = min(chunk or min(LONGEST, left), tokens)
    if longest > left:
        raise ConfigError(
            f"the model has {positions} positions, and {room} are for conversations: lower --chunk to {left}"
        )
    return longest


def make_conversations(
    path: Path,
    place: Place,
    tokens: Sequence[int],
    count: int,
    sample: Sampler,
    *,
    longest: int,
    seed: int = 0,
    done: Callable[[], object] = lambda: None,
) -> None:
    """Write ``count`` conversations to a JSONL file. Those that it has already are kept.

    A round is written at once. What a conversation is depends on its number, seed and corpus alone.

    Args:
        path: the file.
        place: where the corpus stands.
        tokens: its ids.
        count: number of conversations.
        sample: see :class:`Sampler`.
        longest: most tokens of a chunk. A corpus of as many is one chunk, else chunks have a quarter of it or more.
        seed: seed of chunks, prompts and samples.
        done: called after each round.
    """
    lines = whole_lines(path)[:count]
    # only whole rounds are kept, unless the file is complete
    lines = lines[: len(lines) if len(lines) == count else len(lines) // ROUND * ROUND]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(lines))
    for first in range(len(lines), count, ROUND):
        conversations = _round(place, tokens, range(first, min(first + ROUND, count)), sample, longest, seed)
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(conversation)) + "\n" for conversation in conversations))
        done()


def read_conversations(path: Path) -> list[Conversation]:
    """Return the conversations of a file."""
    names = [field.name for field in fields(Conversation)]
    return [Conversation(**{name: line[name] for name in names}) for line in json_lines(path, *names)]


def _round(place: Place, tokens, numbers: range, sample: Sampler, longest: int, seed: int) -> list[Conversation]:
    """Return the conversations of these numbers, which are about one chunk."""
    # by the round's first number, so that a continued run draws as one in one go
    draws = torch.Generator().manual_seed(seed * 1_000_003 + numbers[0])
    a, b = _chunk(len(tokens), longest, draws)
    kinds = [list(SEEDS)[number % len(SEEDS)] for number in numbers]
    picks = [SEEDS[kind][int(torch.randint(len(SEEDS[kind]), (), generator=draws))] for kind in kinds]
    seeds = torch.randint(1 << 31, (2, len(numbers)), generator=draws).tolist()
    before = place.around(tokens[a:b])
    question_drafts = sample(before, [place.asking(pick) for pick in picks], QUESTION, seeds[0])
    questions = [
        place.tokenizer.decode(draft.tokens, skip_special_tokens=True).strip() or PLAIN[kind]
        for draft, kind in zip(question_drafts, kinds, strict=True)
    ]
    prompts = [place.asking(question) for question in questions]
    answers = sample(before, prompts, ANSWER, seeds[1])
    rows = zip(kinds, questions, prompts, answers, strict=True)
    return [Conversation([a, b], kind, question, prompt, *answer) for kind, question, prompt, answer in rows]


def _chunk(tokens: int, longest: int, draws: torch.Generator) -> tuple[int, int]:
    """Return the first token and the one after the last of a random chunk."""
    if tokens <= longest:
        return 0, tokens
    size = int(torch.randint(max(1, longest // 4), longest + 1, (), generator=draws))
    first = int(torch.randint(tokens - size + 1, (), generator=draws))
    return first, first + size
