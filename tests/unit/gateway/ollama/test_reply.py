from __future__ import annotations

import json
from typing import Any

from djinn_client.protocol import Generated, Piece, Timings, Usage
from djinn_client.protocol.fields.chat import ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from djinnd.gateway.http.errors import Problem
from djinnd.gateway.ollama import reply as ollama_reply

TIMINGS = Timings(queued=0.5, first_token=1.5, total=3.5)
USAGE = Usage(prompt_tokens=10, generated_tokens=4, session_tokens=14, computed_tokens=3)


def generated(text: str = "", **fields: Any) -> Generated:
    told: dict[str, Any] = {"finish_reason": "stop", "usage": USAGE, "timings": TIMINGS}
    return Generated(id=1, text=text, token_ids=[], **told | fields)


def lines(*replies: Piece | Generated) -> list[dict[str, Any]]:
    told = ollama_reply.Lines("chat", "m")
    return [each for reply in replies for each in told.take(reply)]


def test_the_lines_of_a_stream():
    told = lines(
        Piece(id=1, text="", delta=ChatDelta("Hm")),
        Piece(id=1, text="Yes"),
        Piece(id=1, text="", delta=ChatDelta("", [ToolCallDelta(0, "t1", "look", '{"a"')])),
        Piece(id=1, text="", delta=ChatDelta("", [ToolCallDelta(0, arguments=": 1}"), ToolCallDelta(1, "t2", "see")])),
        generated(delta=ChatDelta("", [ToolCallDelta(1, arguments="{}")])),
    )
    assert [each["message"] for each in told] == [
        {"role": "assistant", "content": "", "thinking": "Hm"},
        {"role": "assistant", "content": "Yes"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "t1", "function": {"name": "look", "arguments": {"a": 1}}}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "t2", "function": {"name": "see", "arguments": {}}}],
        },
        {"role": "assistant", "content": ""},
    ]
    assert [each["done"] for each in told] == [False] * 4 + [True]
    last = told[-1]
    assert last["done_reason"] == "stop" and last["eval_count"] == 4 and last["prompt_eval_count"] == 10
    assert (last["total_duration"], last["prompt_eval_duration"], last["eval_duration"]) == (
        35 * 10**8,
        10**9,
        2 * 10**9,
    )


def test_an_answer_in_one_line_has_all_of_its_parts():
    answer = ChatMessage("Yes", "Hm", [ToolCall("t1", "look", "{")])
    told = ollama_reply.Lines("chat", "m").whole(generated(message=answer, finish_reason="length"))
    assert told["message"]["content"] == "Yes" and told["message"]["thinking"] == "Hm"
    assert told["message"]["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": "{"}
    assert told["done"] and told["done_reason"] == "length"


def test_a_prompt_s_answer_is_a_response():
    told = ollama_reply.Lines("generate", "m").whole(generated("abc"))
    assert told["response"] == "abc" and "message" not in told


def test_errors_are_one_text():
    assert json.loads(ollama_reply.error(Problem(404, "no"))) == {"error": "no"}
    assert ollama_reply.failed(Problem(500, "no")) == b'{"error":"no"}\n'
