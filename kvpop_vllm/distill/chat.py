"""Conversations, read from records and written as text in the model's own chat format, without omissions.

A list of available tools next to the messages is not part of the conversation and is not read.
"""

from __future__ import annotations

import re

from kvpop_vllm.config import ConfigError

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields next to ``content`` or ``response`` that may hold a reasoning trace."""
FIELDS = ("text", "messages", "prompt", "response", *REASONING)
"""Fields of a record that may hold content."""


def content_of(record: dict, origin: str) -> str | list[dict]:
    """Return the ``messages`` of a record, or its ``text`` if it has none.

    In records with both, the text is the messages written in some format. ``prompt`` and ``response`` are a
    conversation of two messages.

    Args:
        record: the record.
        origin: the record's name for error messages.

    Raises:
        ConfigError: the record has none of these fields, or one of another type.
    """
    record = _filled(record)
    messages, text = record.get("messages"), record.get("text")
    if messages is None and text is None and {"prompt", "response"} <= record.keys():
        answer = {name: record[name] for name in REASONING if name in record} | {"content": record["response"]}
        messages = [{"role": "user", "content": record["prompt"]}, {"role": "assistant"} | answer]
    if isinstance(messages, list):
        return [_message(message, i, origin) for i, message in enumerate(messages)]
    if messages is None and isinstance(text, str):
        return text
    raise ConfigError(
        f"{origin} has no field `text` (a string), `messages` (a list) or `prompt` and `response` (strings): add one"
    )


def _filled(value):
    """Return the value without fields that are None because only other rows of a table have them."""
    if isinstance(value, dict):
        return {name: _filled(part) for name, part in value.items() if part is not None}
    return [_filled(part) for part in value] if isinstance(value, list) else value


def _message(message, number: int, origin: str) -> dict:
    """Return a message with its content as one string; parts are joined.

    Raises:
        ConfigError: a message lacks a role or content, or its content is not text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or len(message) < 2:
        raise ConfigError(f"{origin}: message {number} needs a `role` and a `content`, both text")
    content = message.get("content", "")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ConfigError(f"{origin}: the `content` of message {number} is not text: make it text")
    return message | {"content": content}


def render(tokenizer, messages: list[dict], origin: str, **options) -> str:
    """Return ``messages`` in the tokenizer's chat template.

    Templates of reasoning models leave out the reasoning of earlier turns. In that case the template is
    applied to placeholders, which are then replaced by the whole contents.

    Args:
        tokenizer: the model's tokenizer.
        messages: the conversation.
        origin: the conversation's name for error messages.
        options: options of the template, ``add_generation_prompt=True``.

    Raises:
        ConfigError: there is no template, or it does not accept these messages or leaves a part of them out.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"{origin} is a conversation, but the tokenizer has no chat template: give `text` instead")
    text = _apply(tokenizer, messages, origin, **options)
    for i, message in enumerate(messages):
        if message.get("tool_calls") and _silent(tokenizer, messages, i, text, **options):
            raise ConfigError(
                f"{origin}: the chat template leaves the tool calls of message {i} out: write them into its content"
            )
    if _in_order(text, [part for message in messages for part in (_reasoning(message), message["content"])]):
        return text
    contents = [_with_reasoning(message) for message in messages]
    stand_ins = [f"\ue000{i}\ue001" if content else "" for i, content in enumerate(contents)]
    hollow = [
        {name: value for name, value in message.items() if name not in REASONING} | {"content": stand_in}
        for message, stand_in in zip(messages, stand_ins, strict=True)
    ]
    text = _apply(tokenizer, hollow, origin, **options)
    for i, (content, stand_in) in enumerate(zip(contents, stand_ins, strict=True)):
        if not content:
            continue
        if stand_in not in text:
            role = messages[i]["role"]
            raise ConfigError(f"{origin}: the chat template leaves out message {i} ({role}): change its role")
        if content.startswith("<think>"):  # the template may have added an empty one
            text = re.sub(r"<think>\s*</think>\s*" + stand_in, stand_in, text)
        text = text.replace(stand_in, content)
    return text


def _silent(tokenizer, messages: list[dict], number: int, text: str, **options) -> bool:
    """Return whether a message's tool calls make no difference to the template's output."""
    without = [{n: v for n, v in m.items() if i != number or n != "tool_calls"} for i, m in enumerate(messages)]
    try:
        return tokenizer.apply_chat_template(without, tokenize=False, **options) == text
    except Exception:  # a template may raise anything; it reads the tool calls then
        return False


def _apply(tokenizer, messages: list[dict], origin: str, **options) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"{origin} does not fit the chat template: {' '.join(str(error).split())}") from None


def _reasoning(message: dict) -> str:
    return next((message[name] for name in REASONING if message.get(name) and isinstance(message[name], str)), "")


def _with_reasoning(message: dict) -> str:
    thoughts = _reasoning(message).strip()
    return (f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "") + message["content"]


def _in_order(text: str, parts: list[str]) -> bool:
    start = 0
    for part in map(str.strip, parts):
        start = text.find(part, start)
        if start < 0:
            return False
        start += len(part)
    return True
