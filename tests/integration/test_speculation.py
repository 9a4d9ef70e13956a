"""Speculation changes no token: sessions live the same lives on a model with it and on one without. Guesses come from a
session's own text and from its user's other sessions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

import djinn_client as djinn
from djinn_client.protocol import Generated
from tests.conftest import DaemonStarter
from tests.support.daemon import Daemon
from tests.support.serving import TINY

CODE = """def add(a, b):
    return a + b


def subtract(a, b):
    return a - b


def multiply(a, b):
"""
LIVES = 16


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    models = {name: {"path": str(TINY), "dtype": "float32", "speculation": name} for name in ("auto", "off")}
    with DaemonStarter() as start:
        yield start({"memory": "2GiB", "models": models})


def live(daemon: Daemon, model: str, number: int) -> tuple[list[object], int]:
    """One of many different lives of a session. Returns all that its client saw, and the tokens of guesses kept."""
    choice, seen, kept, length = random.Random(number), list[object](), 0, 0
    options = {"temperature": choice.choice([0.0, 0.0, 0.4, 1.0]), "seed": number}

    def call(session: djinn.Session, prompt: str | None = None, **more: object) -> None:
        nonlocal kept, length
        reply = session.generate(prompt, max_tokens=choice.randint(5, 60), **options, **more)  # type: ignore[arg-type]
        seen.append((reply.token_ids, reply.text, reply.finish_reason, reply.stopped_by, reply.usage.session_tokens))
        if reply.logprobs:
            seen.append([next(iter(entry.top)) for entry in reply.logprobs])  # numbers round otherwise in other steps
        kept, length = kept + reply.usage.kept_tokens, reply.usage.session_tokens

    with djinn.Session(model, address=daemon.address) as session:
        call(session, CODE * choice.randint(1, 3))
        call(session, CODE[: choice.randint(10, 80)], logprobs=2)
        call(session, stop=["return", "\n\n\n"])
        session.truncate(choice.randrange(50, length))
        session.pause("host")
        session.unpause()
        call(session, CODE[:30], min_tokens=5, logit_bias={5: 1.0})
        with session.fork() as fork:
            call(fork, stop_token_ids=[choice.randrange(200)])
            call(session, ignore_eos=True)
        call(session, CODE[:30], repetition_penalty=1.1)
        call(session, regex="[a-z ]*")
    return seen, kept


def test_sessions_that_join_leave_and_move_get_the_tokens_that_they_get_without_it(daemon: Daemon) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = [[*threads.map(partial(live, daemon, model), range(LIVES))] for model in ("auto", "off")]
    for (with_it, _), (without, _) in zip(*found, strict=True):
        assert with_it == without
    kept = [sum(count for _, count in lives) for lives in found]
    assert kept[0] > 200 and kept[1] == 0
    with daemon.client() as client:
        assert client.status(check=True).integrity == []


def streamed(daemon: Daemon, model: str) -> tuple[list[int], Generated]:
    with djinn.Session(model, address=daemon.address) as session:
        stream = session.stream(CODE * 2, max_tokens=100, ignore_eos=True)
        return [token for piece in stream for token in piece.token_ids], stream.result


def test_a_repetitive_text_takes_less_than_half_of_the_steps(daemon: Daemon) -> None:
    tokens, reply = streamed(daemon, "auto")
    assert tokens == streamed(daemon, "off")[0] and len(tokens) == 100
    assert reply.usage.kept_tokens > 50
    assert reply.usage.guessed_tokens >= reply.usage.kept_tokens


def drawn(stack: ExitStack, daemon: Daemon, token: str | None) -> Generated:
    """A new session of the token's user writes a text without repetition, each time the same, and stays open."""
    session = stack.enter_context(djinn.Session("auto", address=daemon.address, token=token))
    return session.generate("def ", max_tokens=120, ignore_eos=True, temperature=1.5, seed=3)


def test_a_user_s_sessions_are_not_guessed_from_another_user_s(daemon: Daemon) -> None:
    """tests/unit/engine/run/test_guesses.py shows that they are from the user's own, where no step's time matters."""
    with daemon.client() as admin, ExitStack() as stack:
        token = admin.add_token("stranger").token
        mine = [drawn(stack, daemon, None) for _ in range(2)]
        other = drawn(stack, daemon, token)
        of_all = admin.status(check=True)
        with djinn.Client(daemon.address, token=token) as stranger:
            own = stranger.status()
    assert of_all.integrity == []
    assert mine[0].token_ids == mine[1].token_ids == other.token_ids
    assert mine[0].usage.kept_tokens < 12 and other.usage.kept_tokens < 12
    assert (own.guessed_tokens, own.kept_tokens) == (other.usage.guessed_tokens, other.usage.kept_tokens)
    assert of_all.guessed_tokens >= mine[1].usage.guessed_tokens + own.guessed_tokens


CALL = {"name": {"enum": ["add", "subtract"]}, "count": {"type": "integer"}}
CALLS = {"type": "array", "items": {"type": "object", "properties": CALL, "required": ["name", "count"]}}
FORMATS: list[dict[str, object]] = [
    {"regex": "[a-z ]*"},
    {"regex": "(def [a-z]+\\(a, b\\):\n    return a [+*-] b\n\n){2,9}"},
    {"grammar": 'start: ("def " NAME "(a, b):\\n    return a " OP " b\\n")+\nNAME: /[a-z]+/\nOP: "+" | "-" | "*"\n'},
    {"regex": "[ab\n ]{40}"},
    {"response_format": {"type": "json_schema", "schema": CALLS}},
]


def formatted(daemon: Daemon, model: str, number: int) -> tuple[list[object], int]:
    """A session's calls with a format, and the tokens of guesses kept. The second call's output repeats the first's."""
    choice, seen, kept = random.Random(number), list[object](), 0
    form, temperature = FORMATS[number % len(FORMATS)], choice.choice([0.0, 0.0, 0.7])
    with djinn.Session(model, address=daemon.address) as session:
        for _ in range(2):
            options: Any = {"max_tokens": 80, "temperature": temperature, "seed": number, **form}
            reply = session.generate(CODE * 2, **options)
            seen.append((reply.token_ids, reply.text, reply.finish_reason, reply.usage.session_tokens))
            kept += reply.usage.kept_tokens
    return seen, kept


def test_outputs_with_a_format_are_those_without_guesses(daemon: Daemon) -> None:
    with ThreadPoolExecutor(6) as threads:
        found = [[*threads.map(partial(formatted, daemon, model), range(20))] for model in ("auto", "off")]
    for (with_it, _), (without, _) in zip(*found, strict=True):
        assert with_it == without
    kept = [sum(count for _, count in some) for some in found]
    assert kept[0] > 10 and kept[1] == 0, kept
