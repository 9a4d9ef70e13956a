"""Outputs that follow a schema, a regular expression or a grammar, through a real daemon."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from djinn_client import AsyncSession, GrammarRejected, Session
from djinn_client.errors import InvalidRequest
from tests.conftest import MODEL, DaemonStarter
from tests.support.chat_families import TOOLS
from tests.support.daemon import Daemon, targets_of, wait_for
from tests.support.models import tiny_model

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["first_name", "age", "favourite_colour"],
    "additionalProperties": False,
}
AS_PERSON = {"type": "json_schema", "schema": PERSON}


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def chatty() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        running = start()
        with running.client() as client:
            client.load(MODEL, chat_template=TOOLS)
        yield running


@pytest.fixture
def open_session(chatty: Daemon) -> Callable[[], Session]:
    return lambda: Session(MODEL, address=chatty.address)


def test_a_schema_is_followed_greedily_and_with_sampling(open_session: Callable[[], Session]) -> None:
    for seed in (None, 1):
        with open_session() as session:
            drawn: Any = {} if seed is None else {"temperature": 1.5, "seed": seed}
            reply = session.generate("Somebody:", response_format=AS_PERSON, max_tokens=400, **drawn)
            assert reply.finish_reason == "stop"
            jsonschema.validate(json.loads(reply.text), PERSON)


def test_a_regular_expression_and_a_grammar_are_followed(open_session: Callable[[], Session]) -> None:
    with open_session() as session:
        reply = session.generate("Call:", regex=r"\+[0-9]{2} [0-9]{3,5}/[0-9]{4}", max_tokens=50)
        assert reply.finish_reason == "stop" and re.fullmatch(r"\+[0-9]{2} [0-9]{3,5}/[0-9]{4}", reply.text)
        reply = session.generate(" Say:", grammar='start: "yes, " /[a-z]{3}/ | "no"', max_tokens=50)
        assert reply.finish_reason == "stop" and re.fullmatch("yes, [a-z]{3}|no", reply.text)


def test_a_stream_has_the_text_of_a_collected_call(open_session: Callable[[], Session]) -> None:
    with open_session() as session, open_session() as other:
        options: Any = {"response_format": AS_PERSON, "max_tokens": 150, "temperature": 1.0, "seed": 4}
        text = "".join(piece.text for piece in session.stream("A thing:", **options))
        assert text == other.generate("A thing:", **options).text
        assert text.startswith("{")


def test_a_format_that_cannot_be_followed_is_refused_and_the_session_stays(open_session: Callable[[], Session]) -> None:
    with open_session() as session:
        session.generate("Once", max_tokens=2)
        before = session.token_ids()
        refused: list[Any] = [
            {"response_format": {"type": "json_schema", "schema": {"type": "string", "minLength": 3, "maxLength": 1}}},
            {"response_format": {"type": "json_schema", "schema": {"type": "nonsense"}}},
            {"regex": "("},
            {"grammar": "start: nowhere"},
            {"grammar": "start: X\nX: /a/ & /b/"},
        ]
        for options in refused:
            with pytest.raises(GrammarRejected):
                session.generate(" more", max_tokens=20, **options)
            assert session.token_ids() == before
        with pytest.raises(InvalidRequest):
            session.generate(" more", regex="a", grammar='start: "a"')


@pytest.mark.long
def test_forced_tokens_in_one_chunk_equal_those_computed_one_by_one(open_session: Callable[[], Session]) -> None:
    """With log probabilities, each token has a step of its own."""
    for seed in range(3):
        options: Any = {"response_format": AS_PERSON, "max_tokens": 200, "temperature": 0.8, "seed": seed}
        with open_session() as session, open_session() as other:
            reply = session.generate("A person:", **options)
            told = other.generate("A person:", logprobs=2, **options)
            assert reply.token_ids == told.token_ids == session.token_ids()[-len(reply.token_ids) :]
            assert len(told.logprobs) == len(told.token_ids)
            assert all(entry.token <= 0 and len(entry.top) == 2 for entry in told.logprobs)


def test_a_stop_string_and_max_tokens_end_an_output_before_its_grammar_does(
    open_session: Callable[[], Session],
) -> None:
    with open_session() as session:
        reply = session.generate("A person:", response_format=AS_PERSON, stop="first_", max_tokens=50)
        assert reply.finish_reason == "stop" and reply.text.endswith('"') and "first" not in reply.text
        reply = session.generate("A person:", response_format=AS_PERSON, max_tokens=3)
        assert reply.finish_reason == "length" and len(reply.token_ids) == 3
        reply = session.generate("No:", regex="(abc){1,9}", logit_bias={0: -100.0}, max_tokens=30)
        assert reply.finish_reason == "stop" and reply.text == "abc" * 9


def test_free_and_guided_sessions_share_steps(open_session: Callable[[], Session], chatty: Daemon) -> None:
    """Each session gets the tokens that it gets alone."""
    calls: list[Any] = [{}, {"response_format": AS_PERSON}, {"regex": "[a-f]{30}"}, {"temperature": 1.0, "seed": 7}]
    alone = []
    for options in calls:
        with open_session() as session:
            alone.append(session.generate("def f(", max_tokens=60, **options).token_ids)

    async def one(options: Any) -> list[int]:
        async with AsyncSession(MODEL, address=chatty.address) as session:
            return (await session.generate("def f(", max_tokens=60, **options)).token_ids

    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(*map(one, calls))

    assert asyncio.run(all_at_once()) == alone


def test_an_answer_of_a_chat_has_the_format(open_session: Callable[[], Session]) -> None:
    with open_session() as session:
        answer = session.chat("Who?", response_format=AS_PERSON, max_tokens=300)
        assert answer.message is not None
        jsonschema.validate(json.loads(answer.message.content), PERSON)
        assert session.messages[-1]["content"] == answer.message.content


@pytest.mark.parametrize("choice", ["required", "function:weather"])
def test_a_tool_call_is_forced_and_read(open_session: Callable[[], Session], choice: str) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    tools = [TOOL] if choice == "required" else [other, TOOL]
    with open_session() as session:
        answer = session.chat("Rain?", tools=tools, tool_choice=choice, parallel_tools=False, max_tokens=300)
        assert answer.message is not None
        (call,) = answer.message.tool_calls
        assert call.name == "weather"
        jsonschema.validate(json.loads(call.arguments), TOOL["function"]["parameters"])
        with pytest.raises(InvalidRequest, match="no tools"):
            session.chat("Rain?", tool_choice="required")
        with pytest.raises(InvalidRequest, match="function:nothing"):
            session.chat("Rain?", tools=[TOOL], tool_choice="function:nothing")


@pytest.mark.long
def test_several_outputs_of_one_prompt_have_the_format(open_session: Callable[[], Session]) -> None:
    with open_session() as s:
        reply = s.generate("Year: ", n=3, regex="[0-9]{4}", temperature=1.0, seed=3, logit_bias={40: -5.0})
        assert all(re.fullmatch("[0-9]{4}", choice.text) for choice in reply.choices)
        calls = s.chat("And the weather?", n=2, tools=[TOOL], tool_choice="required", max_tokens=200)
        assert [choice.message.tool_calls[0].name for choice in calls.choices if choice.message] == ["weather"] * 2
        with pytest.raises(InvalidRequest, match="leave min_tokens out"):
            s.generate("Year: ", regex="[0-9]{4}", min_tokens=2)


def test_an_unloaded_model_leaves_no_tokens_in_memory(chatty: Daemon, tmp_path: Path) -> None:
    """The server keeps a table of the tokens of a model that users brought. Calls that have ended do not keep it."""
    folder = str(shutil.copytree(tiny_model(), tmp_path / "brought"))

    def has_table() -> bool:
        return any("djinn-tokens" in target for target in targets_of(chatty.pid))

    with chatty.client() as client:
        client.load(folder, kv_bytes=4 << 20, host_kv_bytes=0, disk_kv_bytes=0)
        with Session(folder, address=chatty.address) as s:
            s.generate("x", max_tokens=8, regex="[ab]+")
        assert has_table()
        client.unload(folder)
        wait_for(lambda: not has_table())
