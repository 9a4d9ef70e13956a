from __future__ import annotations

import json
from typing import Any

import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.chat import ChatInput
from djinnd.text.chat.conversation import (
    MAX_DEPTH,
    MAX_MESSAGES,
    ChatConversation,
    TemplateFeatures,
    read_conversation,
    read_tools,
)

PLAIN = TemplateFeatures.of("{% for m in messages %}{{ m.content }}{% endfor %}")


def read(
    messages: Any, features: TemplateFeatures = PLAIN, tools: Any = None, arguments: Any = None, **options: Any
) -> ChatConversation:
    texts = [b"" if each is None else json.dumps(each).encode() for each in (tools, arguments)]
    return read_conversation(ChatInput(json.dumps(messages).encode(), *texts, **options), features)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "at least one message"),
        ({}, "must be a JSON list"),
        (["hello"], "must be an object"),
        ([{"content": "x"}], "has the role 'None'; it must be one of system"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        ([{"role": ["user"], "content": "x"}], "it must be one of"),
        ([{"role": "user", "content": 7}], "content must be a text, or a list of parts"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "'image_url', and this model takes text",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "text must be a text"),
        ([{"role": "user", "content": [7]}], "of the type 'None'"),
        ([{"role": "assistant", "reasoning_content": {}}], "reasoning_content must be a text"),
        ([{"role": "assistant", "tool_calls": {}}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [7]}], "an object with a function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "the name of a tool call must be a text"),
        ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "too many: at most 10,000"),
        ([{"role": "user", "content": "x", "more": deep(MAX_DEPTH)}], "inside one another"),
    ],
)
def test_invalid_messages_are_refused(messages: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        read(messages)


@pytest.mark.parametrize("text", [b"", b"[", b"\xff", b'["\\ud800"]', b"[" * 100_000, b"nan"])
def test_invalid_json_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="messages: "):
        read_conversation(ChatInput(text), PLAIN)


@pytest.mark.parametrize("arguments", [{"messages": []}, {"bos_token": "x"}, {"add_generation_prompt": False}, [1]])
def test_arguments_that_a_template_may_not_get(arguments: Any) -> None:
    with pytest.raises(InvalidRequest, match="argument"):
        read([{"role": "user", "content": "x"}], arguments=arguments)


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        (7, "tool 0 must be"),
        ({"function": {}}, "tool 0 must be"),
        ({"type": "web_search", "name": "x"}, "only functions"),
    ],
)
def test_invalid_tools_are_refused(tool: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        read([{"role": "user", "content": "x"}], tools=[tool])


def test_nulls_and_names_of_reasoning() -> None:
    message = {"role": "assistant", "content": None, "reasoning": "hm", "name": None}
    told = {"role": "assistant", "thinking": "hm", "reasoning_content": "hm"}
    assert read([message]).messages == [told]
    wants_null = TemplateFeatures.of("{% if message['content'] is none %}")
    assert read([message], wants_null).messages == [{**told, "content": None}]


def test_arguments_of_calls_are_objects_where_they_can_be() -> None:
    def arguments(text: Any) -> Any:
        (message,) = read(
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]
        ).messages
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"a": 1.0}') == {"a": 1.0}
    assert arguments("") == arguments(None) == {}
    assert arguments("{oops") == "{oops"
    assert arguments("[1]") == "[1]"
    assert arguments({"a": 1}) == {"a": 1}


def test_a_developer_is_a_system_message_where_the_template_knows_none() -> None:
    message = {"role": "developer", "content": "x"}
    assert read([message]).messages[0]["role"] == "system"
    assert read([message], TemplateFeatures.of("developer")).messages[0]["role"] == "developer"


def test_content_in_the_form_that_the_template_reads() -> None:
    parts = [{"type": "text", "text": "a"}, "b"]
    as_parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    loops = "{% for part in message['content'] %}"
    for template, text, several in (
        ("{{ message.content }} {% if '</think>' in content %}", "a", "a\nb"),
        (f"{{% if message.content is string %}}{loops}", "a", as_parts),
        (loops, as_parts[:1], as_parts),
    ):
        messages = [{"role": "user", "content": "a"}, {"role": "user", "content": parts}]
        assert [each["content"] for each in read(messages, TemplateFeatures.of(template)).messages] == [text, several]


def test_tools_are_left_out_where_none_may_be_called() -> None:
    tools = [{"name": "f", "parameters": {"type": "object"}}]
    message = [{"role": "user", "content": "x"}]
    assert read(message, tools=tools).tools == [{"type": "function", "function": tools[0]}]
    assert read(message, tools=tools, tool_choice="none").tools is None
    assert read(message, tools=[]).tools is None
    assert read_tools(json.dumps(tools).encode()) == {"f": {"type": "object"}}
