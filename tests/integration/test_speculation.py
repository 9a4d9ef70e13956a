"""Speculation changes no token: sessions live the same lives on a model with it and on one without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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
