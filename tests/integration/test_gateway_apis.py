"""Anthropic's and Ollama's APIs in front of a real daemon; tests/foreign has their own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import MODEL
from tests.support.gateway import Gateway, gateway_with_tools

ASK = [{"role": "user", "content": "def add(a, b):"}]
MESSAGES: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0, "messages": ASK}
CHAT: dict[str, Any] = {"model": MODEL, "options": {"num_predict": 8, "temperature": 0}, "messages": ASK}
LOOK = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with gateway_with_tools() as running:
        yield running


def _lines_that_leave(gateway: Gateway, room: int) -> int:
    """How many lines leave room for `room` tokens, or some more."""
    first, second = (
        gateway.post("/v1/messages/count_tokens", MESSAGES | {"messages": [{"role": "user", "content": text}]}).json
        for text in ("x = 1\n" * 100, "x = 1\n" * 200)
    )
    tokens = second["input_tokens"] - first["input_tokens"]  # of 100 lines
    return 100 + (2048 - room - first["input_tokens"]) * 100 // tokens


def lines(content: bytes) -> list[Any]:
    return [json.loads(line) for line in content.splitlines()]


def test_a_message_whole_and_streamed(gateway):
    whole = gateway.post("/v1/messages", MESSAGES).json
    streamed = gateway.post("/v1/messages", MESSAGES | {"stream": True})
    events = [json.loads(line[6:]) for line in streamed.content.decode().splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"] != ""
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "max_tokens"


@pytest.mark.long
def test_more_tokens_than_the_context_has_room_for(gateway):
    long = [{"role": "user", "content": "x = 1\n" * _lines_that_leave(gateway, 32)}]
    whole = gateway.post("/v1/messages", MESSAGES | {"messages": long, "max_tokens": 32_000}).json
    used = whole["usage"]
    assert whole["stop_reason"] in ("model_context_window_exceeded", "end_turn")
    assert used["input_tokens"] + used["cache_read_input_tokens"] + used["output_tokens"] <= 2048
    options = {"num_predict": 32_000, "temperature": 0}
    last = lines(gateway.post("/api/chat", CHAT | {"messages": long, "options": options}).content)[-1]
    assert last["done"] and last["eval_count"] == used["output_tokens"]


def test_a_forced_call_follows_the_tool_s_schema(gateway):
    tool = {"name": "look", "input_schema": LOOK}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = gateway.post("/v1/messages", MESSAGES | {"max_tokens": 64, "tools": [tool], "tool_choice": choice}).json
    (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert call["name"] == "look" and call["input"]["n"] in (1, 2)


def test_with_a_format_and_tools_an_answer_follows_the_one_or_calls_the_others(gateway):
    tools = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": LOOK}}
    body = {"model": MODEL, "messages": ASK, "max_tokens": 200, "tools": tools, "response_format": wanted}
    for seed in range(4):
        answer = gateway.post("/v1/chat/completions", body | {"seed": seed, "parallel_tool_calls": False})
        assert answer.status == 200, answer.content
        message = answer.json["choices"][0]["message"]
        calls = message.get("tool_calls") or [{"function": {"arguments": message["content"]}}]
        assert json.loads(calls[0]["function"]["arguments"])["n"] in (1, 2)


def test_a_chat_of_ollama_s_whole_and_streamed(gateway):
    whole = gateway.post("/api/chat", CHAT | {"stream": False}).json
    *parts, last = lines(gateway.post("/api/chat", CHAT).content)
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"] != ""
    assert last["done"] and last["eval_count"] == whole["eval_count"] == 8


def test_ollama_s_empty_prompt_loads_a_model_and_with_a_lifetime_of_nothing_unloads_it():
    with gateway_with_tools() as gateway:  # its own: the next load of the model has no chat template
        assert gateway.post("/api/generate", {"model": MODEL}).json["done_reason"] == "load"
        assert [model["name"] for model in gateway.get("/api/ps").json["models"]] == [MODEL]
        answer = gateway.post("/api/generate", {"model": MODEL, "keep_alive": "0s"})
        assert answer.json["done_reason"] == "unload" and gateway.get("/api/ps").json["models"] == []


def test_fields_inside_others_that_have_no_effect_are_named(gateway):
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": []}
    answer = gateway.post("/v1/messages", MESSAGES | {"messages": [{"role": "user", "content": [block]}]})
    assert answer.status == 200 and answer.headers["x-djinn-ignored"] == "messages.content.citations"
    answer = gateway.post("/api/chat", CHAT | {"keep_alive": "5m", "messages": [ASK[0] | {"mood": 1}]})
    assert answer.headers["x-djinn-ignored"] == "keep_alive, messages.mood"


def test_refusals_have_each_api_s_shape(gateway):
    answer = gateway.post("/v1/messages", b"{")
    assert answer.status == 400 and answer.json["error"]["type"] == "invalid_request_error"
    answer = gateway.post("/v1/messages", MESSAGES | {"messages": [*ASK, {"role": "system", "content": "a"}]})
    assert answer.status == 400 and "role system is not supported" in answer.json["error"]["message"]
    answer = gateway.post("/api/chat", CHAT | {"model": "nobody"})
    assert answer.status == 404 and "nobody" in answer.json["error"]
    assert isinstance(gateway.get("/api/nothing").json["error"], str)


def test_the_gateway_says_what_ollama_says_of_itself(gateway):
    assert gateway.get("/").content == b"Ollama is running"
    assert [model["name"] for model in gateway.get("/api/tags").json["models"]] == [MODEL]
    assert "tools" in gateway.post("/api/show", {"model": MODEL}).json["capabilities"]
