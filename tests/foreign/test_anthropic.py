"""Anthropic's own client against the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")

MODEL = "djinn-tiny"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "def add(a, b):"}]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "messages": ASK, "extra_body": {"temperature": 0}}


LOOK = {
    "name": "look",
    "description": "Looks something up.",
    "input_schema": {
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["count"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(gateway) -> Any:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as made:
        yield made


def test_an_answer_has_text_and_usage(client):
    message = client.messages.create(**GREEDY)
    (block,) = message.content
    assert block.type == "text" and block.text
    assert message.stop_reason == "max_tokens" and message.model == MODEL
    assert message.usage.output_tokens == 12
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 0


def test_a_stream_is_the_same_answer(client):
    whole = client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(texts) == message.content[0].text == whole.content[0].text
    assert len(texts) > 1
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 12


def test_tokens_are_counted_as_they_are_used(client):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    counted = client.messages.count_tokens(model=MODEL, system=system, messages=ASK)
    usage = client.messages.create(system=system, **GREEDY).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert counted.input_tokens > client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens


def test_a_stop_sequence_ends_an_answer(client):
    text = client.messages.create(**GREEDY).content[0].text
    stop = text[len(text) // 2 :][:3]
    message = client.messages.create(**GREEDY, stop_sequences=[stop, "never"])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    assert text.startswith(message.content[0].text) and stop not in message.content[0].text


def test_an_answer_that_has_begun_goes_on(client):
    whole = client.messages.create(**GREEDY).content[0].text
    begun = [*ASK, {"role": "assistant", "content": "    return"}]
    rest = client.messages.create(**GREEDY | {"messages": begun}).content[0].text
    assert rest and rest != whole


def test_a_forced_call_of_a_tool(client):
    choice = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    wanted = GREEDY | {"max_tokens": 64, "tools": [LOOK], "tool_choice": choice}
    message = client.messages.create(**wanted)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert call.name == "look" and 1 <= call.input["count"] <= 9
    with client.messages.stream(**wanted) as stream:
        events = [event for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert streamed.content[-1].input == call.input
    assert json.loads("".join(event.partial_json for event in events)) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "found"}
    turn = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**GREEDY | {"messages": turn, "tools": [LOOK]}).content


def test_a_turn_computes_its_new_messages_only(client):
    first = client.messages.create(**GREEDY | {"messages": [{"role": "user", "content": "x = 1\n" * 100}]})
    turn = [
        {"role": "user", "content": "x = 1\n" * 100},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "and more?"},
    ]
    usage = client.messages.create(**GREEDY | {"messages": turn}).usage
    before = first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens
    assert usage.cache_read_input_tokens > before - 32
    assert usage.input_tokens < 64


def test_several_messages_run_at_once(gateway):
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
            messages = await asyncio.gather(*[client.messages.create(**GREEDY) for _ in range(4)])
        return [message.content[0].text for message in messages]

    assert len(set(asyncio.run(ask()))) == 1


@pytest.mark.parametrize(
    ("fields", "kind", "told"),
    [
        ({"model": "nobody"}, "NotFoundError", "nobody"),
        ({"messages": []}, "BadRequestError", "at least one message"),
        ({"messages": [*ASK, {"role": "system", "content": "a"}]}, "BadRequestError", "role system is not supported"),
        ({"messages": [{"role": "user", "content": "a " * 100_000}]}, "BadRequestError", "prompt is too long"),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
    ],
)
def test_errors_are_the_client_s_own(client, fields, kind, told):
    with pytest.raises(getattr(anthropic, kind), match=told):
        client.messages.create(**GREEDY | fields)


def test_fields_without_effect_are_named(client):
    raw = client.messages.with_raw_response.create(**GREEDY, metadata={"user_id": "me"}, inference_geo="eu")
    assert raw.headers["x-djinn-ignored"] == "inference_geo, metadata"
