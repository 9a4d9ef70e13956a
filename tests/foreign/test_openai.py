"""OpenAI's own Python client, unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.conftest import MODEL

USER = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Verdict(BaseModel):
    answer: Literal["yes", "no"]


@pytest.fixture(scope="module")
def client(gateway: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as running:
        yield running


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_chat_whole_and_streamed(client):
    options: Any = {"model": MODEL, "messages": USER, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.usage is not None and whole.usage.completion_tokens == 8
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_openai_s_stream_helper_reads_the_events(client):
    kinds = []
    with (
        contextlib.suppress(openai.LengthFinishReasonError),  # the helper makes it of every answer that is cut off
        client.chat.completions.stream(model=MODEL, messages=USER, max_tokens=8) as stream,
    ):
        for event in stream:
            kinds.append(event.type)
    assert "content.delta" in kinds


def test_a_tool_that_must_be_called(client):
    options: Any = {"model": MODEL, "messages": USER, "tools": [TOOL], "max_tokens": 200, "parallel_tool_calls": False}
    choice = client.chat.completions.create(tool_choice="required", **options).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(tool_choice=named, **options) as stream:
        stream.until_done()
    (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.id and streamed.function.name == "get_weather"
    assert json.loads(streamed.function.arguments)["city"] in ("Paris", "Rome")


def test_a_call_and_its_result_go_on(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=4)
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_openai_s_parse_returns_the_typed_answer(client):
    parsed = client.chat.completions.parse(
        model=MODEL, messages=USER, response_format=Verdict, max_tokens=200, temperature=0
    )
    assert parsed.choices[0].message.parsed.answer in ("yes", "no")


def test_log_probabilities(client):
    options: Any = {"model": MODEL, "messages": USER, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert len(content) == 4 and all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)


def test_completions(client):
    answer = client.completions.create(
        model=MODEL, prompt=["def f(", "class A"], max_tokens=4, n=2, seed=1, logprobs=2, stop=["\n\n"]
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(answer.choices[0].logprobs.tokens) <= 4
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model=MODEL, prompt="a", suffix="b")


def test_embeddings(client):
    answer = client.embeddings.create(model=MODEL, input=["one text", "another"])  # base64 on the wire
    plain = client.embeddings.create(model=MODEL, input=["one text", "another"], encoding_format="float")
    assert len(answer.data) == 2 and len(answer.data[0].embedding) == 192
    assert answer.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert answer.usage.prompt_tokens > 2


def test_errors_are_the_client_s_classes(client, gateway):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=USER, max_tokens=10**6)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=USER)
    stranger = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="djn_" + "A" * 43, max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_many_streams_run_at_once(gateway):
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        messages: Any = [{"role": "user", "content": f"number {number}"}]
        stream = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*[ask(client, number) for number in range(8)])

    assert all(asyncio.run(ask_all()))
