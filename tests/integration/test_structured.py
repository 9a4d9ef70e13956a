"""Outputs that follow a schema, a regular expression or a grammar, through a real daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from djinn_client import GrammarRejected, Session
from djinn_client.errors import InvalidRequest
from tests.support.daemon import Daemon

MODEL = "djinn-tiny"
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


@pytest.fixture
def open_session(daemon: Daemon) -> Callable[[], Session]:
    return lambda: Session(MODEL, address=daemon.address)


def test_a_schema_is_met_greedily_and_drawn(open_session: Callable[[], Session]) -> None:
    for seed in (None, 1, 2, 3):
        with open_session() as session:
            drawn: Any = {} if seed is None else {"temperature": 1.5, "seed": seed}
            reply = session.generate("Somebody:", response_format=AS_PERSON, max_tokens=400, **drawn)
            assert reply.finish_reason == "stop"
            jsonschema.validate(json.loads(reply.text), PERSON)


def test_a_regular_expression_and_a_grammar_are_met(open_session: Callable[[], Session]) -> None:
    with open_session() as session:
        reply = session.generate("Call:", regex=r"\+[0-9]{2} [0-9]{3,5}/[0-9]{4}", max_tokens=50)
        assert reply.finish_reason == "stop" and re.fullmatch(r"\+[0-9]{2} [0-9]{3,5}/[0-9]{4}", reply.text)
        reply = session.generate(" Say:", grammar='start: "yes, " /[a-z]{3}/ | "no"', max_tokens=50)
        assert reply.finish_reason == "stop" and re.fullmatch("yes, [a-z]{3}|no", reply.text)


def test_what_is_streamed_is_what_is_answered(open_session: Callable[[], Session]) -> None:
    with open_session() as session, open_session() as other:
        options: Any = {"response_format": AS_PERSON, "max_tokens": 150, "temperature": 1.0, "seed": 4}
        text = "".join(piece.text for piece in session.stream("A thing:", **options))
        assert text == other.generate("A thing:", **options).text
        assert text.startswith("{")


def test_a_format_that_cannot_be_followed_is_refused_and_the_session_stays(open_session: Callable[[], Session]) -> None:
    with open_session() as session:
        session.generate("Once", max_tokens=2)
        before = session.token_ids
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
            assert session.token_ids == before
        with pytest.raises(InvalidRequest):
            session.generate(" more", regex="a", grammar='start: "a"')
