from __future__ import annotations

import json
from typing import Any

from msgspec.structs import replace

from djinn_client.protocol import Generated, Piece, Timings, Usage
from djinn_client.protocol.fields.chat import ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from djinnd.gateway.anthropic import reply as anthropic_reply
from djinnd.gateway.http.errors import Problem

USAGE = Usage(prompt_tokens=10, generated_tokens=4, session_tokens=14, computed_tokens=3)


def generated(text: str = "", **fields: Any) -> Generated:
    told: dict[str, Any] = {"finish_reason": "stop", "usage": USAGE, "timings": Timings()}
    return Generated(id=1, text=text, token_ids=[], **told | fields)


def piece(text: str = "", reasoning: str = "", *calls: ToolCallDelta) -> Piece:
    return Piece(id=1, text=text, delta=ChatDelta(reasoning, list(calls)))


def events(*replies: Piece | Generated) -> list[dict[str, Any]]:
    stream = anthropic_reply.Events("msg_1", "m", 4)
    told = stream.begin() + b"".join(data for reply in replies for data in stream.take(reply))
    frames = [frame.split("\n") for frame in told.decode().split("\n\n") if frame]
    payloads = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name.removeprefix("event: ") for name, _ in frames] == [payload["type"] for payload in payloads]
    return payloads


def test_an_answer_becomes_blocks_of_thinking_text_and_tool_use():
    answer = ChatMessage("Yes.", "Hm.", [ToolCall("t1", "look", '{"a": 1}')])
    told = anthropic_reply.message("msg_1", "m", 4, generated(message=answer))
    assert told["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Yes."},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}},
    ]
    assert told["stop_reason"] == "tool_use"
    assert told["usage"]["input_tokens"] == 3 and told["usage"]["cache_read_input_tokens"] == 7
    assert told["usage"]["output_tokens"] == 4


def test_an_answer_without_words_has_a_block_all_the_same():
    told = anthropic_reply.message("msg_1", "m", 4, generated(message=ChatMessage()))
    assert told["content"] == [{"type": "text", "text": ""}]
    assert told["stop_reason"] == "end_turn"


def test_why_an_answer_ended():
    message = ChatMessage("a")
    whys = [
        generated(message=message, finish_reason="length"),
        generated(message=message, finish_reason="length", usage=replace(USAGE, generated_tokens=3)),
        generated(message=message, stopped_by="END"),
        generated(message=message),
    ]
    told = [anthropic_reply.message("msg_1", "m", 4, reply) for reply in whys]
    assert [(each["stop_reason"], each["stop_sequence"]) for each in told] == [
        ("max_tokens", None),
        ("model_context_window_exceeded", None),
        ("stop_sequence", "END"),
        ("end_turn", None),
    ]


def test_arguments_that_are_no_object_are_told_as_they_are():
    answer = ChatMessage("", "", [ToolCall("t1", "look", '{"a": ')])
    (block,) = anthropic_reply.message("msg_1", "m", 4, generated(message=answer))["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": '}


def test_the_events_of_a_stream():
    begun = ToolCallDelta(0, "t1", "look", '{"a"')
    told = events(
        piece(reasoning="H"),
        piece(reasoning="m"),
        piece("Ye"),
        piece("s"),
        piece("", "", begun),
        piece("", "", ToolCallDelta(0, arguments=": 1}"), ToolCallDelta(1, "t2", "see", "{}")),
        generated(message=ChatMessage("Yes", "Hm", [ToolCall("t1", "look", '{"a": 1}')])),
    )
    assert [(each["type"], each.get("index")) for each in told] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3),
        ("content_block_delta", 3),
        ("content_block_stop", 3),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert told[9]["content_block"] == {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    assert told[10]["delta"] == {"type": "input_json_delta", "partial_json": '{"a"'}
    assert told[16]["delta"]["stop_reason"] == "tool_use"
    assert told[16]["usage"]["output_tokens"] == 4


def test_an_empty_stream_begins_and_ends():
    told = events(generated(message=ChatMessage()))
    assert [each["type"] for each in told] == ["message_start", "message_delta", "message_stop"]


def test_errors_have_anthropic_s_names():
    told = json.loads(anthropic_reply.error(Problem(429, "later")))
    assert told == {"type": "error", "error": {"type": "rate_limit_error", "message": "later"}}
    long = json.loads(anthropic_reply.error(Problem(400, "9 tokens", "context_length_exceeded")))
    assert long["error"] == {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens"}
    assert json.loads(anthropic_reply.error(Problem(500, "a")))["error"]["type"] == "api_error"
    assert anthropic_reply.failed(Problem(503, "a")).startswith(b"event: error\ndata: {")
