from __future__ import annotations

import msgspec
import pytest

from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.responses.items import items_of, messages_of


def told(*items):
    return msgspec.to_builtins(messages_of(items_of(list(items))))


def test_a_text_is_the_user_s_message():
    (item,) = items_of("hello")
    assert item["id"].startswith("msg_")
    assert msgspec.to_builtins(messages_of([item])) == [{"role": "user", "content": "hello"}]


def test_items_keep_their_ids():
    assert [item["id"] for item in items_of([{"role": "user", "content": "x", "id": "msg_1"}])] == ["msg_1"]


def test_reasoning_answer_and_calls_are_one_message_of_the_assistant():
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    assert told(
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yes", "annotations": []}]},
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ) == [
        {"role": "developer", "content": "ab"},
        {
            "role": "assistant",
            "content": "yes",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("c1", "c2")
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]


def test_a_call_after_the_user_begins_a_message():
    messages = told(
        {"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}
    )
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert "content" not in messages[1]


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({"role": "wizard", "content": "x"}, "wizard"),
        ({"type": ["message"], "role": "user", "content": "x"}, "does not know"),
        ({"role": "user"}, "lacks 'content'"),
        ({"role": "user", "content": 5}, "not as it must be"),
        ({"role": "user", "content": [5]}, "not as it must be"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input_image"),
        ({"type": "item_reference", "id": "x"}, "item_reference"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "not as it must be"),
        ({"type": "function_call_output", "call_id": "c"}, "lacks 'output'"),
        ({"type": [], "role": "user", "content": "x"}, "not"),
    ],
    ids=str,
)
def test_other_items_are_refused_by_their_place(item, why):
    with pytest.raises(HttpError, match=why) as refused:
        messages_of(items_of([{"role": "user", "content": "x"}, item]))
    assert (refused.value.problem.status, refused.value.problem.param) == (400, "input[1]")
