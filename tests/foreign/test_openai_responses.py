"""OpenAI's own client and the Responses API of the gateway."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest

import djinn_client
from djinn_client.arguments.options import build
from djinn_client.protocol import KeepRecord, RecordKept
from djinnctl.restart import restart
from tests.support.chat_families import TOOLS
from tests.support.conversations import Program

openai = pytest.importorskip("openai")

MODEL = "djinn-tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
ASK = "def add(a, b):"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 4}},
        "required": ["word"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def client(gateway) -> Any:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_response_ends_at_its_most_tokens(client):
    response = client.responses.create(input=ASK, **GREEDY)
    assert response.id.startswith("resp_") and response.output_text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.output_tokens, response.model) == (12, MODEL)
    assert response.usage.total_tokens == response.usage.input_tokens + 12


def test_a_stream_tells_the_same_response(client):
    whole = client.responses.create(input=ASK, **GREEDY)
    with client.responses.stream(input=ASK, **GREEDY) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text


def test_a_response_is_gone_on_from_and_computes_what_is_new(client):
    first = client.responses.create(input=ASK, instructions="Be brief.", **GREEDY)
    second = client.responses.create(
        input="And subtract?", instructions="Be brief.", previous_response_id=first.id, **GREEDY
    )
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens - 4
    transcript = [
        {"role": "user", "content": ASK},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "And subtract?"},
    ]
    whole = client.responses.create(input=transcript, instructions="Be brief.", store=False, **GREEDY)
    assert (second.output_text, second.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    branch = client.responses.create(input="Why?", previous_response_id=first.id, **GREEDY)
    assert branch.previous_response_id == first.id and branch.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_a_stored_response_is_retrieved_listed_and_deleted(client):
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "input_text", "text": "y"}]}]
    made = client.responses.create(input=messages, metadata={"a": "b"}, **GREEDY)
    again = client.responses.retrieve(made.id)
    assert (again.output_text, again.metadata, again.usage) == (made.output_text, {"a": "b"}, made.usage)
    listed = client.responses.input_items.list(made.id, order="asc", limit=1)
    assert [item.content for item in listed.data] == ["x"] and listed.has_more
    assert len(list(client.responses.input_items.list(made.id))) == 2  # page by page
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="not found"):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="z", previous_response_id=made.id, **GREEDY)


def test_functions_are_called_and_answered(client):
    tools: dict[str, Any] = {"tools": [TOOL, {"type": "web_search"}], **GREEDY, "max_output_tokens": 64}
    tools["parallel_tool_calls"] = False
    raw = client.responses.with_raw_response.create(input="Look it up.", tool_choice="required", **tools)
    assert "tools.web_search" in raw.headers["x-djinn-ignored"]
    made = raw.parse()
    (call,) = [item for item in made.output if item.type == "function_call"]
    assert call.name == "look_up" and call.arguments.startswith('{"word"') and call.call_id
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "a word"}
    after = client.responses.create(input=[output], previous_response_id=made.id, **GREEDY)
    assert after.output_text
    with client.responses.stream(input="Look it up.", tool_choice="required", **tools) as stream:
        events = list(stream)
        assert stream.get_final_response().output[-1].arguments == call.arguments
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments == done.arguments == call.arguments


def test_an_output_follows_its_schema(client):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    made = client.responses.create(input=ASK, text={"format": form}, **GREEDY)
    assert re.match(r'\s*\{\s*"a"', made.output_text), made.output_text
    assert made.text.format.type == "json_schema"


def test_a_name_that_is_no_response_s_is_not_found(gateway, client):
    """Records of programs that speak to the daemon itself."""
    with Program(gateway.daemon) as program:
        for number, body in enumerate((b"", b"\xff", b"[]", b'{"response": 5}', b"[" * 100_000)):
            program.ask(build(KeepRecord, model=MODEL, record=f"resp_{number}", body=body), RecordKept)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(f"resp_{number}")


def test_a_conversation_is_named_once_and_goes_on(client):
    first = client.responses.create(input=ASK, conversation="talk-1", **GREEDY)
    second = client.responses.create(input="And?", conversation={"id": "talk-1"}, **GREEDY)
    same = client.responses.create(input="And?", previous_response_id=first.id, **GREEDY)
    assert (second.output_text, second.usage.input_tokens) == (same.output_text, same.usage.input_tokens)


def test_one_in_progress_is_cancelled(client):
    events, names = [], []
    begun = threading.Event()

    def read() -> None:
        for event in client.responses.create(input=ASK, model=MODEL, stream=True, max_output_tokens=1500):
            events.append(event)
            if event.type == "response.created":
                names.append(event.response.id)
            if event.type == "response.output_text.delta":
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    cancelled = client.responses.cancel(names[0])
    reader.join(60)
    assert cancelled.status == events[-1].response.status == "cancelled"
    assert client.responses.retrieve(names[0]).output_text == cancelled.output_text != ""
    with pytest.raises(openai.BadRequestError, match="in progress"):
        client.responses.cancel(names[0])


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "nobody"}, openai.NotFoundError),
        ({"background": True}, openai.BadRequestError),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, openai.BadRequestError),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, openai.BadRequestError),
        ({"input": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, openai.BadRequestError),
        ({"previous_response_id": "resp_" + "0" * 48}, openai.NotFoundError),
        ({"tool_choice": {"type": "web_search"}}, openai.BadRequestError),
        ({"max_output_tokens": 0}, openai.BadRequestError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_that_cannot_be_honoured_are_refused(client, fields, error):
    with pytest.raises(error):
        client.responses.create(**{"input": ASK, **GREEDY, **fields})


def test_a_response_survives_a_restart_of_the_daemon(gateway, client):
    first = client.responses.create(input=ASK, **GREEDY)
    with djinn_client.Client(gateway.daemon) as daemon:
        restart(daemon, warm=False)
        daemon.load(MODEL, chat_template=TOOLS)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(input="And subtract?", previous_response_id=first.id, **GREEDY)
    assert second.usage.input_tokens > first.usage.total_tokens


def test_the_asynchronous_client_gets_the_same_response(gateway):
    async def play() -> str:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            return (await client.responses.create(input=ASK, **GREEDY)).output_text

    assert asyncio.run(play())
