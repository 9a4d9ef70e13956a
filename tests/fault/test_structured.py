"""Formats that would take all time or memory, and killed processes that follow formats: other calls notice nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import djinn_client as djinn
from djinn_client import errors
from tests.conftest import MODEL, DaemonStarter
from tests.support.checkpoint_files import tiny_with
from tests.support.daemon import Daemon, descendants_of
from tests.support.parameters import long_except

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "numbers": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "schema": SCHEMA}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        running = start(
            {"memory": "3GiB", "limits": {"text_seconds": 3, "engine_silence": "1h"}}, errors=["engine_lost"]
        )
        with running.client() as client:
            client.load(MODEL)
        yield running


def generated(daemon: Daemon, model: str = MODEL, **options: Any) -> djinn.Generated:
    with djinn.Session(model, address=daemon.address) as session:
        return session.generate("A record:", **{"response_format": FORMAT, "max_tokens": 80, **options})


def grammar_processes(daemon: Daemon) -> list[int]:
    return [
        pid
        for pid in descendants_of(daemon.device().pid)
        if b"djinnd.grammars" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def chain(length: int) -> dict[str, Any]:
    """A chain of references that is deeper than a recursive compiler's stack."""
    steps = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"type": "null"}]} for n in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": steps | {f"a{length}": {"type": "null"}}}


BOMBS: dict[str, Any] = {
    "a long chain of references": {"response_format": {"type": "json_schema", "schema": chain(4000)}},
    "nested repetitions": {"regex": "((a{1,1000}){1,1000}){1,1000}b"},
    "many properties": {
        "response_format": {
            "type": "json_schema",
            "schema": {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(9000)}},
        }
    },
    "deep parentheses": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "many rules": {"grammar": "start: r0\n" + "\n".join(f'r{n}: "a" r{(n + 1) % 9000} | "b"' for n in range(9000))},
    "a large text": {"regex": "a" * (300 << 10)},
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", long_except(("a large text",), BOMBS))
def test_a_bomb_is_refused_or_followed_without_further_harm(guarded: Daemon, name: str) -> None:
    with djinn.Session(MODEL, address=guarded.address) as session:
        before = guarded.device().restarts
        try:
            session.generate("Once", max_tokens=4, **BOMBS[name])
        except (errors.GrammarRejected, errors.TextFailed, errors.InvalidRequest):
            assert session.token_ids() == []
        assert session.generate("Once", max_tokens=4).usage.generated_tokens == 4
    assert guarded.device().restarts == before


def test_a_grammar_that_becomes_too_ambiguous_ends_its_call_only(guarded: Daemon) -> None:
    with djinn.Session(MODEL, address=guarded.address) as session:
        try:
            session.generate("a", grammar='start: s\\ns: s s | "a" | s s s |', max_tokens=300)
        except (errors.GrammarRejected, errors.TextFailed):
            assert session.token_ids() == []
    assert generated(guarded).usage.generated_tokens > 0


@pytest.mark.smoke
def test_a_killed_grammar_process_ends_its_calls_and_is_replaced(guarded: Daemon) -> None:
    with djinn.Session(MODEL, address=guarded.address) as session:
        stream = session.stream("A:", regex="[a-z]{2000}", max_tokens=1500)
        next(stream)
        (process,) = grammar_processes(guarded)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(errors.TextFailed, match="signal 9"):
            for _ in stream:
                pass
        assert session.token_ids() == []
        assert session.generate("A:", regex="[a-z]{5}", max_tokens=20).finish_reason == "stop"


def test_a_stranger_s_model_follows_formats_with_a_table_of_its_tokens(guarded: Daemon, tmp_path: Path) -> None:
    folder = str(tiny_with(tmp_path / "theirs", lambda config: None))
    reply = generated(guarded, folder, max_tokens=300, temperature=1.0, seed=3)
    if reply.finish_reason == "stop":
        jsonschema.validate(json.loads(reply.text), SCHEMA)
    assert reply.text.startswith("{")
    assert generated(guarded, folder, response_format=None, regex="ab{3}c").text == "abbbc"


def test_a_format_for_a_model_without_a_tokenizer_is_refused(guarded: Daemon, tmp_path: Path) -> None:
    folder = tiny_with(tmp_path / "mute", lambda config: None)
    (folder / "tokenizer.json").unlink()
    with djinn.Session(str(folder), address=guarded.address) as session, pytest.raises(errors.NoTokenizer):
        session.generate([1, 2, 3], regex="a")


def test_an_output_with_a_format_continues_on_the_next_engine(guarded: Daemon) -> None:
    options: Any = {"response_format": FORMAT, "max_tokens": 200, "temperature": 1.0, "seed": 11}
    whole = generated(guarded, **options)
    with djinn.Session(MODEL, address=guarded.address) as session:
        stream = session.stream("A record:", **options)
        pieces = [next(stream)]
        guarded.kill_engine()
        pieces += list(stream)
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
        assert stream.result.finish_reason == whole.finish_reason
