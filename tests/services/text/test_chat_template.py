"""Templates behave as under transformers, and cannot leave the sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from services.text.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    Conversation,
    InvalidTemplate,
)

USER = {"role": "user", "content": "hi"}


def render(source: str, *messages: dict[str, Any], **rest: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(Conversation(messages=messages or [USER], **rest))


def test_messages_special_tokens_and_generation_prompt() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert render(source) == "<s>[user]hi[assistant]"
    assert render(source, add_generation_prompt=False) == "<s>[user]hi"


def test_blocks_are_trimmed_and_loop_controls_work() -> None:
    source = (
        "{% for m in messages %}\n"
        "    {% if m.role == 'system' %}\n"
        "        {% continue %}\n"
        "    {% endif %}\n"
        "{{ m.content }}\n"
        "{% endfor %}\n"
    )
    assert render(source, {"role": "system", "content": "no"}, USER) == "hi\n"


def test_json_is_not_escaped_for_html() -> None:
    tools = [{"name": "<f>", "description": "caf\u00e9 & 'x'"}]
    assert render("{{ tools | tojson }}", tools=tools) == (
        '[{"name": "<f>", "description": "caf\u00e9 & \'x\'"}]'
    )
    assert render("{{ tools | tojson(indent=1) }}", tools=[]) == "[]"


def test_documents_and_variables_pass_through() -> None:
    source = "{{ documents[0].text }}{{ enable_thinking }}{{ 'x' if tools is none }}"
    assert (
        render(source, documents=[{"text": "d"}], variables={"enable_thinking": False}) == "dFalsex"
    )


def test_variables_do_not_replace_messages() -> None:
    with pytest.raises(ChatTemplateError, match="messages"):
        render("{{ messages }}", variables={"messages": []})


def test_generation_tag_and_clock() -> None:
    source = "{% generation %}a{{ messages[0].content }}{% endgeneration %}{{ strftime_now('%Y') }}"
    assert render(source).startswith("ahi2")


def test_null_content_becomes_absent_then_empty() -> None:
    calls = [{"function": {"name": "f", "arguments": '{"a": 1}'}}]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    needs_content = "{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}"
    assert render(needs_content, turn) == "[]"
    knows_absence = "{{ 'none' if messages[0].content is not defined else 'some' }}"
    assert render(knows_absence, turn) == "none"


def test_tool_arguments_become_objects() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    for text, expected in (('{"a": 1}', '{"a": 1}'), ("not json", '"not json"'), ("[1]", '"[1]"')):
        calls = [{"function": {"name": "f", "arguments": text}}]
        assert render(source, {"role": "assistant", "tool_calls": calls}) == expected


def test_reasoning_is_known_under_all_its_names() -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    assert render(source, {"role": "assistant", "content": "", "reasoning": "r"}) == "rr"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ messages[7].content.x }}", "refuses"),
        ("{{ 1 / 0 }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_failures_are_errors_of_the_request(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        render(source)


def test_a_broken_template_is_an_error_of_the_model() -> None:
    with pytest.raises(InvalidTemplate, match="does not compile"):
        ChatTemplate("{% if %}", {})
