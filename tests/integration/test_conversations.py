"""Programs that know no sessions: the daemon finds theirs, and computes only what is new."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import djinn_client as djinn
from djinnctl.restart import restart
from tests.conftest import MODEL, DaemonStarter
from tests.support.conversing import Program
from tests.support.daemon import Daemon

LIMITS = {"conversations_per_user": 4}


@pytest.fixture(scope="module")
def talkative() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start({"limits": LIMITS})


@pytest.fixture
def program(talkative: Daemon) -> Iterator[Program]:
    program = Program(talkative.address)
    yield program
    program.close()


def page_size(daemon: Daemon) -> int:
    with daemon.client() as client:
        return max(model.page_size for model in client.models())


def turn(number: int, size: int = 12) -> list[int]:
    return [(number * 31 + place * 7) % 200 + 1 for place in range(size)]


@pytest.mark.parametrize("key", ["", "chat-1"])
def test_ten_turns_compute_what_is_new_and_go_on_after_a_restart(talkative: Daemon, key: str) -> None:
    program, sessions = Program(talkative.address), set()
    for number in range(10):
        if number == 5:
            program.close()
            with talkative.client() as client:
                restart(client, warm=True)  # the pages stay on the host
            program.connection = Program(talkative.address).connection
        new = turn(number + 100 * len(key), size=80)
        reply = program.say(new, key=key)
        sessions.add(reply.session)
        assert reply.usage.prompt_tokens == len(program.transcript) - len(reply.token_ids)
        page = page_size(talkative) if number == 5 else 0  # a restart keeps full pages
        assert reply.usage.computed_tokens <= len(new) + 1 + page
        assert reply.usage.cached_tokens == reply.usage.prompt_tokens - reply.usage.computed_tokens
    assert len(sessions) == 1
    with djinn.attach(sessions.pop(), address=talkative.address) as kept:
        assert kept.token_ids == program.transcript
        with djinn.Session(MODEL, address=talkative.address) as whole:
            last = program.transcript[: -len(reply.token_ids)]
            assert whole.generate(last, max_tokens=8, ignore_eos=True, temperature=0).token_ids == reply.token_ids
    program.close()
