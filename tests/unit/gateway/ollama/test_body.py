from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.ollama.body import ChatBody, GenerateBody

SAY: dict[str, Any] = {"model": "m:latest", "messages": [{"role": "user", "content": "Hello"}]}


def body(**fields: Any) -> ChatBody:
    return msgspec.convert(SAY | fields, ChatBody)


def test_ollama_s_options_become_fields_of_the_call():
    wanted = body(format="json", options={"num_predict": 7, "stop": ["END"], "seed": 3, "temperature": 0}).generation()
    assert (wanted.max_tokens, wanted.stop, wanted.sampling.seed) == (7, ["END"], 3)
    assert wanted.sampling.temperature == 0
    assert wanted.format == OutputFormat("json_object")
    assert body().model_name == "m"


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
def test_a_body_that_cannot_be_answered_is_refused(fields: dict[str, Any], told: str):
    wanted = body(**fields)
    with pytest.raises(HttpError, match=told) as caught:
        wanted.generation(chat=wanted.chat())
    assert caught.value.problem.status == 400


def test_a_prompt_with_a_suffix_is_refused():
    with pytest.raises(HttpError, match="suffix"):
        msgspec.convert({"model": "m", "prompt": "a", "suffix": "b"}, GenerateBody).expect_possible()


def test_options_without_effect_are_named():
    assert list(body(options={"num_ctx": 4096, "seed": 1}).ignored()) == ["options.num_ctx"]


@pytest.mark.parametrize(
    ("keep_alive", "unloads"),
    [
        (0, True),
        (0.0, True),
        ("0", True),
        ("0s", True),
        ("0.0h", True),
        (5, False),
        ("5m", False),
        (-1, False),
        (None, False),
    ],
)
def test_a_lifetime_of_nothing_unloads_a_model(keep_alive, unloads):
    assert ChatBody(model="m", keep_alive=keep_alive).unloads == unloads
