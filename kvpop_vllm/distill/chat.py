"""Conversations as text, in the model's own chat format, with nothing that was said left out."""

from __future__ import annotations

import re

from kvpop_vllm.config import ConfigError

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields beside ``content`` in which a reasoning trace may stand."""


def render(tokenizer, messages: list[dict], where: str) -> str:
    """``messages`` in the tokenizer's chat template.

    Templates of reasoning models leave the reasoning of earlier turns out. Where that happens, the template is given
    stand-ins for the contents, and the whole contents are put in their place.

    Args:
        where: what errors call the conversation.

    Raises:
        ConfigError: there is no template, or it does not take these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"{where} is a conversation, but the tokenizer has no chat template: give `text` instead")
    text = _apply(tokenizer, messages, where)
    said = [part for message in messages for part in (*_reasoning(message), message.get("content") or "")]
    if _in_order(text, said):
        return text
    whole = [_whole(message) for message in messages]
    stand_ins = [f"\ue000{i}\ue001" if content else content for i, content in enumerate(whole)]
    hollow = []
    for message, stand_in in zip(messages, stand_ins, strict=True):
        hollow.append({name: value for name, value in message.items() if name not in REASONING} | {"content": stand_in})
    text = _apply(tokenizer, hollow, where)
    for i, (content, stand_in) in enumerate(zip(whole, stand_ins, strict=True)):
        if text.count(stand_in) < 1 and content:
            raise ConfigError(
                f"{where}: the chat template leaves out message {i} ({messages[i]['role']}): change its role"
            )
        if content.startswith("<think>"):  # the template may have opened an empty one itself
            text = re.sub(r"<think>\s*</think>\s*" + stand_in, stand_in, text)
        text = text.replace(stand_in, content) if content else text
    return text


def _apply(tokenizer, messages: list[dict], where: str) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # whatever a template raises
        raise ConfigError(f"{where} does not fit the chat template: {' '.join(str(error).split())}") from None


def _reasoning(message: dict) -> list[str]:
    return [message[name] for name in REASONING if isinstance(message.get(name), str)]


def _whole(message: dict) -> str:
    thoughts = "".join(f"<think>\n{text.strip()}\n</think>\n\n" for text in _reasoning(message)[:1])
    return thoughts + (message.get("content") or "")


def _in_order(text: str, parts: list[str]) -> bool:
    at = 0
    for part in map(str.strip, parts):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True
