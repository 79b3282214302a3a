"""Place of a corpus in a prompt: in the first message of a chat, or in front of everything.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.chat import render

SEPARATOR = "\n\n"
"""Text between a corpus and the user's own words in a message."""
MARK = "\ue000corpus\ue001"
"""Stands for the user's message while a chat template is filled in."""


@dataclass(frozen=True)
class Place:
    """Place of a corpus in a prompt: its ids are ``[*head, *corpus, *end]``, and a user's words follow.

    Attributes:
        tokenizer: the model's.
        head: ids before the corpus, with which the prompt of a chat begins too. Empty in front of everything.
        end: ids that separate the corpus from what follows.
        system: the system message of ``head``, None for that of the chat template, if it has one.
    """

    tokenizer: object
    head: list[int]
    end: list[int]
    system: str | None = None

    def read(self, text: str) -> list[int]:
        """Return the ids of a corpus. In front of everything it begins as the tokenizer's texts do."""
        return self.tokenizer(text, add_special_tokens=not self.head, verbose=False)["input_ids"]

    def around(self, corpus: Sequence[int]) -> list[int]:
        """Return the ids that a cache of the corpus stands for."""
        return [*self.head, *corpus, *self.end]

    def asking(self, prompt: str) -> list[int]:
        """Return the ids of a user's words after the corpus, up to where the model's answer begins."""
        if self.head:
            ids = self._ids(_chat(self.tokenizer, self.system, prompt))
            if ids[: len(self.head)] != self.head:
                raise ConfigError("the chat template changes what is before a message: use --place front")
            return ids[len(self.head) :]
        if getattr(self.tokenizer, "chat_template", None):
            chat = _chat(self.tokenizer, self.system, prompt)
            # the corpus begins with special tokens already, and the chat's own would stand in the middle of the text
            special = self.tokenizer.decode(special_ids(self.tokenizer), skip_special_tokens=False)
            return self._ids(SEPARATOR + chat[len(special) * _repeats(chat, special) :])
        return self._ids(f"{SEPARATOR}{prompt}{SEPARATOR}")

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def place_of(tokenizer, place: str | None = None, system: str | None = None) -> Place:
    """Return the place of a corpus for a model.

    Args:
        tokenizer: the model's.
        place: ``message``, ``front``, or None for the first where there is a chat template.
        system: system message of the chats, or None for that of the template.
    """
    templated = bool(getattr(tokenizer, "chat_template", None))
    if not templated and (place == "message" or system is not None):
        option = "--system" if system is not None else "--place message"
        raise ConfigError(f"the tokenizer has no chat template: leave {option} out")
    if place == "front" and system is not None:
        raise ConfigError("a corpus in front of a chat has no system message before it: leave --system out")
    if not templated or place == "front":
        return Place(tokenizer, [], [])
    head = _chat(tokenizer, system, MARK).split(MARK, 1)[0]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (head, SEPARATOR)]
    if ids[0]:
        return Place(tokenizer, *ids, system)
    if place == "message":
        raise ConfigError("the chat template writes nothing before a message: use --place front")
    return Place(tokenizer, [], [])


def special_ids(tokenizer) -> list[int]:
    """Return the ids that a tokenizer writes before every text, such as BOS."""
    plain, ids = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a", add_special_tokens=True)
    first = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), 0)
    return list(ids[:first])


def begin_of_text(tokenizer, ids: Sequence[int], text: str | None) -> list[int]:
    """Return the special ids with which a text begins. After a cartridge in front of everything it has none.

    Args:
        tokenizer: the model's.
        ids: ids of the text.
        text: the text, whose special ids are the tokenizer's where it does not spell them out, or None for a chat,
            whose template writes them too.
    """
    special = special_ids(tokenizer)
    count = _repeats(list(ids), special)
    if count and text is not None:
        count = max(0, count - _repeats(text, tokenizer.decode(special, skip_special_tokens=False)))
    return special * count


def ids_after(tokenizer, head: Sequence[int], prompt: str | list[dict]) -> list[int]:
    """Return the ids of a text or of a chat after a cartridge, up to where the model's answer begins.

    Args:
        tokenizer: the model's.
        head: the cartridge's.
        prompt: the text, or the chat's messages.
    """
    if isinstance(prompt, str):
        text, ids = prompt, tokenizer(prompt, verbose=False)["input_ids"]
    else:
        chat = render(tokenizer, prompt, "the prompt", add_generation_prompt=True)
        text, ids = None, tokenizer(chat, add_special_tokens=False, verbose=False)["input_ids"]
    head = list(head) or begin_of_text(tokenizer, ids, text)
    if ids[: len(head)] != head:
        raise ConfigError("the prompt begins in another way than the cartridge: give the chat that it was made for")
    return ids[len(head) :]


def _repeats(sequence: Sequence, part: Sequence) -> int:
    """Return how many times a sequence begins with a part, 0 for an empty part."""
    count, size = 0, len(part)
    while size and sequence[count * size : (count + 1) * size] == part:
        count += 1
    return count


def _chat(tokenizer, system: str | None, prompt: str) -> str:
    """Return a chat of one message of the user, up to where the model's answer begins."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    return render(tokenizer, messages, "the prompt", add_generation_prompt=True)
