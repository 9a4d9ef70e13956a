from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from djinn_client.chat import ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from djinn_client.output_format import OutputFormat
from djinn_client.protocol import Generated, ModelInfo, Piece, Timings, TokenizerInfo, Usage
from djinnd.gateway import ollama_models, ollama_reply
from djinnd.gateway.errors import HttpError, Problem
from djinnd.gateway.ollama_body import ChatBody, GenerateBody

SAY: dict[str, Any] = {"model": "m:latest", "messages": [{"role": "user", "content": "Hello"}]}
TIMINGS = Timings(queued=0.5, first_token=1.5, total=3.5)
USAGE = Usage(prompt_tokens=10, generated_tokens=4, session_tokens=14, computed_tokens=3)


def body(**fields: Any) -> ChatBody:
    return msgspec.convert(SAY | fields, ChatBody)


def generated(text: str = "", **fields: Any) -> Generated:
    told: dict[str, Any] = {"finish_reason": "stop", "usage": USAGE, "timings": TIMINGS}
    return Generated(id=1, text=text, token_ids=[], **told | fields)


def lines(*replies: Piece | Generated) -> list[dict[str, Any]]:
    told = ollama_reply.Lines("chat", "m")
    return [each for reply in replies for each in told.take(reply)]


def test_a_chat():
    wanted = body(format="json", options={"num_predict": 7, "stop": ["END"], "seed": 3, "temperature": 0}).generation()
    assert (wanted.max_tokens, wanted.stop, wanted.sampling.seed) == (7, ["END"], 3)
    assert wanted.sampling.temperature == 0
    assert wanted.format == OutputFormat("json_object")
    assert body().model_name == "m" and body().is_streamed


def test_defaults_are_ollama_s():
    wanted = body().generation()
    assert wanted.max_tokens is None
    assert (wanted.sampling.temperature, wanted.sampling.top_p, wanted.sampling.top_k) == (0.8, 0.9, 40)


def test_calls_and_their_results_get_ids_by_their_place():
    turn = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Look.",
            "tool_calls": [
                {"function": {"name": "look", "arguments": {"city": "Paris"}}},
                {"function": {"name": "look", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "rain", "tool_name": "look"},
        {"role": "tool", "content": "sun", "tool_name": "look"},
    ]
    _, answer, first, second = json.loads(body(messages=turn).chat().messages)
    assert answer["reasoning_content"] == "Look."
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == ['{"city": "Paris"}', "{}"]
    assert [call["id"] for call in answer["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
    assert first["name"] == "look"


@pytest.mark.parametrize(
    ("think", "told"),
    [
        (None, None),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
    ],
)
def test_thinking_becomes_an_argument_of_the_template(think: Any, told: Any):
    arguments = body(think=think).chat().arguments
    assert (json.loads(arguments) if arguments else None) == told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"format": "xml"}, "not 'xml'"),
        ({"options": {"top_k": "many"}}, "options"),
        ({"messages": [{"role": "user", "images": ["aGk="]}]}, "images cannot be read"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], told: str):
    wanted = body(**fields)
    with pytest.raises(HttpError, match=told) as caught:
        wanted.generation(chat=wanted.chat())
    assert caught.value.problem.status == 400


def test_a_prompt_with_a_suffix_is_refused():
    with pytest.raises(HttpError, match="suffix"):
        msgspec.convert({"model": "m", "prompt": "a", "suffix": "b"}, GenerateBody).expect_possible()


def test_options_without_effect_are_named():
    assert body(options={"num_ctx": 4096, "seed": 1}).ignored() == ["options.num_ctx"]


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


def test_a_whole_answer():
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


def test_what_a_model_is_and_can():
    info = ModelInfo(name="m", path="/m", family="llama", parameters=7_200_000_000, max_context=4096, dtype="bfloat16")
    template = "{% if tools %}…{% endif %}<think>"
    told = ollama_models.shown(info, TokenizerInfo(id=1, has_text=True, has_chat=True, chat_template=template))
    assert told["details"]["parameter_size"] == "7.2B"
    assert told["model_info"]["llama.context_length"] == 4096
    assert told["capabilities"] == ["completion", "embedding", "tools", "thinking"]
    assert {"name", "modified_at", "size", "digest", "details"} <= ollama_models.tag(info).keys()
