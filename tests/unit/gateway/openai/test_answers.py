from __future__ import annotations

import msgspec

from djinn_client.protocol import Piece
from djinn_client.protocol.fields.chat import ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from djinnd.gateway.openai.answers import answer_of, deltas_of


def test_an_answer_in_openai_s_shape():
    called = answer_of(ChatMessage("", "because", [ToolCall("c1", "f", "{}")]))
    assert msgspec.to_builtins(called) == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "because",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    assert msgspec.to_builtins(answer_of(ChatMessage())) == {"role": "assistant", "content": ""}


def test_the_first_delta_of_a_call_alone_has_its_name():
    first = Piece(id=1, text="t", delta=ChatDelta("r", [ToolCallDelta(0, "c1", "f", "{")]))
    second = Piece(id=1, text="", delta=ChatDelta("", [ToolCallDelta(0, arguments="}")]))
    begun = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    assert [msgspec.to_builtins(delta) for delta in deltas_of(first)] == [
        {"reasoning_content": "r"},
        {"content": "t"},
        {"tool_calls": [begun]},
    ]
    (rest,) = deltas_of(second)
    assert msgspec.to_builtins(rest) == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
