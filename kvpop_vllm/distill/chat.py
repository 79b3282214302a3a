"""Conversations: read from records, written as text in the model's own chat format with nothing that was said left out.

What is not said is: a list of tools on offer beside the messages is not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kvpop_vllm.config import ConfigError

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields beside ``content`` or ``response`` in which a reasoning trace may stand."""
FIELDS = ("text", "messages", "prompt", "response", *REASONING)
"""What a record may say something in."""


def content_of(record: dict, where: Callable[[], str]) -> str | list[dict]:
    """The ``messages`` of a record, or its ``text`` where it has none (of records with both, the text is the messages written
    out in some format); ``prompt`` and ``response`` are a conversation of two messages.

    Args:
        where: what errors call the record.

    Raises:
        ConfigError: it has none of them, or one of another type.
    """
    record = _filled(record)
    messages, text = record.get("messages"), record.get("text")
    if messages is None and text is None and {"prompt", "response"} <= record.keys():
        answer = {name: record[name] for name in REASONING if name in record} | {"content": record["response"]}
        messages = [{"role": "user", "content": record["prompt"]}, {"role": "assistant"} | answer]
    if isinstance(messages, list):
        return [_message(message, i, where) for i, message in enumerate(messages)]
    if messages is None and isinstance(text, str):
        return text
    raise ConfigError(
        f"{where()} has no field `text` (a string), `messages` (a list) or `prompt` and `response` (strings): add one"
    )


def _filled(value):
    """Without the fields that are there only because other rows of a table have them."""
    if isinstance(value, dict):
        return {name: _filled(part) for name, part in value.items() if part is not None}
    return [_filled(part) for part in value] if isinstance(value, list) else value


def _message(message, number: int, where: Callable[[], str]) -> dict:
    """A message whose content is one string: parts are joined."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or len(message) < 2:
        raise ConfigError(f"{where()}: message {number} needs a `role` and a `content`, both text")
    content = message.get("content", "")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ConfigError(f"{where()}: the `content` of message {number} is not text: make it text")
    return message | {"content": content}


def render(tokenizer, messages: list[dict], where: Callable[[], str]) -> str:
    """``messages`` in the tokenizer's chat template.

    Templates of reasoning models leave the reasoning of earlier turns out. Where that happens, the template is given
    stand-ins for the contents, and the whole contents are put in their place.

    Args:
        where: what errors call the conversation.

    Raises:
        ConfigError: there is no template, or it does not take these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"{where()} is a conversation, but the tokenizer has no chat template: give `text` instead")
    text = _apply(tokenizer, messages, where)
    for i, message in enumerate(messages):
        if message.get("tool_calls") and _silent(tokenizer, messages, i, text):
            raise ConfigError(
                f"{where()}: the chat template leaves the tool calls of message {i} out: write them into its content"
            )
    if _in_order(text, [part for message in messages for part in (_reasoning(message), message["content"])]):
        return text
    contents = [_whole(message) for message in messages]
    stand_ins = [f"\ue000{i}\ue001" if content else "" for i, content in enumerate(contents)]
    hollow = [
        {name: value for name, value in message.items() if name not in REASONING} | {"content": stand_in}
        for message, stand_in in zip(messages, stand_ins, strict=True)
    ]
    text = _apply(tokenizer, hollow, where)
    for i, (content, stand_in) in enumerate(zip(contents, stand_ins, strict=True)):
        if not content:
            continue
        if stand_in not in text:
            role = messages[i]["role"]
            raise ConfigError(f"{where()}: the chat template leaves out message {i} ({role}): change its role")
        if content.startswith("<think>"):  # the template may have opened an empty one itself
            text = re.sub(r"<think>\s*</think>\s*" + stand_in, stand_in, text)
        text = text.replace(stand_in, content)
    return text


def _silent(tokenizer, messages: list[dict], number: int, text: str) -> bool:
    """Whether a message's tool calls make no difference to what the template writes."""
    without = [{n: v for n, v in m.items() if i != number or n != "tool_calls"} for i, m in enumerate(messages)]
    try:
        return tokenizer.apply_chat_template(without, tokenize=False) == text
    except Exception:  # whatever a template raises: it looks at them
        return False


def _apply(tokenizer, messages: list[dict], where: Callable[[], str]) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # whatever a template raises
        raise ConfigError(f"{where()} does not fit the chat template: {' '.join(str(error).split())}") from None


def _reasoning(message: dict) -> str:
    return next((message[name] for name in REASONING if message.get(name) and isinstance(message[name], str)), "")


def _whole(message: dict) -> str:
    thoughts = _reasoning(message).strip()
    return (f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "") + message["content"]


def _in_order(text: str, parts: list[str]) -> bool:
    at = 0
    for part in map(str.strip, parts):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True
