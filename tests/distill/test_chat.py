"""Conversations in the model's chat format: no content is omitted, and what does not fit is refused."""

from __future__ import annotations

import pytest
from distill.byte_tokenizer import byte_tokenizer

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.chat import content_of, render

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
"""Template without reasoning."""
THINKS = """{% for m in messages %}<{{ m.role }}>
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- if m.role == 'assistant' and loop.last %}<think>
{{ (m.reasoning_content or '').strip() }}
</think>

{% endif %}{{ said }}{% endfor %}"""
"""Template as of reasoning models, which shows the reasoning of the last turn alone."""


def turns(*contents, **reasoning):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    messages[-1] |= reasoning
    return messages


def said(template, messages):
    return render(byte_tokenizer(template), messages, "here")


def test_the_template_is_kept_to_where_it_leaves_nothing_out():
    assert said(PLAIN, turns("Why?", " So.\n")) == "<user>Why?<assistant>So."
    expected = "<user>Why?<assistant><think>\nHm.\n</think>\n\nSo."
    assert said(THINKS, turns("Why?", "So.", reasoning_content="Hm.")) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("template", [PLAIN, THINKS])
def test_reasoning_is_written_out_under_every_name(template, name):
    expected = "<user>Why?<assistant><think>\nHm.\n</think>\n\nSo."
    assert said(template, turns("Why?", "So.", **{name: "Hm."})) == expected


@pytest.mark.parametrize("inline", [False, True])
def test_reasoning_of_earlier_turns_stays(inline):
    first = "<think>\nHm.\n</think>\n\nSo."
    answer = turns("Why?", first) if inline else turns("Why?", "So.", reasoning_content="Hm.")
    messages = answer + turns("And?", "Also.", reasoning_content="Well.")
    expected = f"<user>Why?<assistant>{first}<user>And?<assistant><think>\nWell.\n</think>\n\nAlso."
    assert said(THINKS, messages) == expected


def test_reasoning_under_two_names_is_written_once():
    text = said(THINKS, turns("Why?", "So.", reasoning_content="Hm.", reasoning="Hm."))
    assert text.count("Hm.") == text.count("<think>") == 1


def test_records_of_prompt_and_response_are_conversations():
    record = {"prompt": "Why?", "response": "So.", "thinking": "Hm.", "messages": None, "source": 3}
    assert content_of(record, None) == turns("Why?", "So.", thinking="Hm.")
    assert content_of(record | {"text": "whole"}, None) == "whole"
    assert content_of(record | {"text": "whole", "messages": turns("a")}, None) == turns("a")


REFUSED = {
    "no template": (None, "^here is a conversation, but the tokenizer has no chat template: give `text` instead$"),
    "a role left out": (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "^here: the chat template leaves out message 1 .assistant.: change its role$",
    ),
    "an exception": ("{{ raise_exception('roles must\nalternate') }}", "^here does not fit the chat template: .* must alter"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_template_is_refused(case):
    template, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        said(template, turns("Why?", "So."))


def test_tool_calls_that_the_template_leaves_out_are_refused():
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"place": {"city": "Oslo"}}'}}
    messages = [*turns("Cold?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ConfigError, match="^here: the chat template leaves the tool calls of message 1 out"):
        said(PLAIN, messages)
    shows = PLAIN.replace("{% endfor %}", "{{ m.tool_calls | tojson if m.tool_calls else '' }}{% endfor %}")
    assert "Oslo" in said(shows, messages)
    call["function"]["arguments"] = '{"city": "\\u5317, 3"}'
    assert call["function"]["arguments"] in said(shows.replace(" | tojson", "[0].function.arguments"), messages)
