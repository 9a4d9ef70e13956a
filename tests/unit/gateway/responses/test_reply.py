from __future__ import annotations

import json

import msgspec
import pytest

from djinn_client.protocol import Generated, Piece, Timings, Usage
from djinn_client.protocol.fields.chat import ChatDelta, ToolCallDelta
from djinnd.gateway.responses.body import Body
from djinnd.gateway.responses.reply import Answer


def piece(text="", reasoning="", *calls):
    return Piece(id=1, text=text, delta=ChatDelta(reasoning, list(calls)))


def last(reason="stop", text=""):
    usage = Usage(20, 5, 25, 3, 17)
    return Generated(id=1, text=text, token_ids=[], finish_reason=reason, usage=usage, timings=Timings())


@pytest.fixture
def answer():
    return Answer("resp_1", 7, Body(model="m"))


def events(*told):
    """Names and fields; numbers are in order."""
    parts = [part.split("\ndata: ") for part in b"".join(told).decode().split("\n\n") if part]
    decoded = [json.loads(data) for _, data in parts]
    assert [f"event: {each['type']}" for each in decoded] == [name for name, _ in parts]
    assert [each["sequence_number"] for each in decoded] == list(range(len(decoded)))
    return decoded


def test_reasoning_text_and_calls_are_items_one_after_another(answer):
    told = events(
        answer.begin(),
        answer.take(piece(reasoning="hm")),
        answer.take(piece("a", "m")),
        answer.take(piece("b")),
        answer.take(piece("", "", ToolCallDelta(0, "c1", "f"), ToolCallDelta(0, arguments="{"))),
        answer.take(piece("", "", ToolCallDelta(0, arguments="}"), ToolCallDelta(1, "c2", "g", "[]"))),
        answer.take(last()),
        answer.end(),
    )
    short = [each["type"].removeprefix("response.") for each in told]
    part = ["content_part.done", "output_item.done"]
    assert short == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *part),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", *part),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    done = told[-1]["response"]
    assert (done["status"], done["incomplete_details"], done["usage"]["input_tokens_details"]) == (
        "completed",
        None,
        {"cached_tokens": 17},
    )
    thought, message, *calls = done["output"]
    assert (thought["content"][0]["text"], message["content"][0]["text"]) == ("hmm", "ab")
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == [
        ("c1", "f", "{}"),
        ("c2", "g", "[]"),
    ]
    assert {item["status"] for item in done["output"]} == {"completed"}
    assert msgspec.to_builtins(answer.message)["reasoning_content"] == "hmm"
    assert [call.id for call in answer.message.tool_calls] == ["c1", "c2"]


def test_the_first_events_show_the_response_as_it_was_then(answer):
    told = events(answer.begin(), answer.take(piece("a")), answer.take(last(text="b")), answer.end())
    assert told[0]["response"]["output"] == told[2]["item"]["content"] == []
    assert told[3]["part"]["text"] == ""


def test_an_answer_that_was_cut_off_is_incomplete(answer):
    told = events(answer.begin(), answer.take(piece("a")), answer.take(last("length")), answer.end())
    done = told[-1]["response"]
    assert (told[-1]["type"], done["status"]) == ("response.incomplete", "incomplete")
    assert done["incomplete_details"] == {"reason": "max_output_tokens"}
    assert done["output"][0]["status"] == "incomplete"


def test_an_empty_answer_is_an_empty_message(answer):
    answer.take(last())
    (message,) = answer.output
    assert message["content"][0]["text"] == "" and answer.message.content == ""


def test_a_cancelled_one_has_what_had_come(answer):
    told = events(answer.begin(), answer.take(piece("a")), answer.cancelled(), answer.end())
    done = told[-1]["response"]
    assert (told[-1]["type"], done["status"], done["usage"]) == ("response.incomplete", "cancelled", None)
    assert (done["output"][0]["content"][0]["text"], done["output"][0]["status"]) == ("a", "incomplete")
