"""Two users of a real daemon, and a prefix that its administrator publishes, across a restart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import djinn_client as djinn
from djinnctl.restart import restart
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import Daemon
from tests.support.other_user import as_user, only_root, open_to_all

PAGE = 256
SYSTEM = [7 + place % 900 for place in range(2 * PAGE + 9)]
QUESTIONS = [[*SYSTEM, 11, 12, 13], [*SYSTEM, 21, 22, 23]]


@contextmanager
def session_of(user: int, daemon: Daemon) -> Iterator[djinn.Session]:
    """A session of another user, by SO_PEERCRED."""
    with as_user(user):
        session = djinn.Session(MODEL, address=daemon.address)
    with session:
        assert session.info.user == user
        yield session


def ask(user: int, daemon: Daemon, prompt: list[int]) -> tuple[int, list[int]]:
    """Generates for a user. Returns the number of computed prompt tokens, and the generated tokens."""
    with session_of(user, daemon) as session:
        reply = session.generate(prompt, max_tokens=8, ignore_eos=True)
        return reply.usage.computed_tokens, reply.token_ids


@only_root
@pytest.mark.long
def test_users_share_a_published_prefix(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon()
    open_to_all(daemon.folder, daemon.address)
    length = len(QUESTIONS[0])
    alone = []
    for user, question in zip((1000, 1001), QUESTIONS, strict=True):
        computed, tokens = ask(user, daemon, question)
        assert computed == length, "no prefix is public yet"
        alone.append(tokens)
    with djinn.Session(MODEL, address=daemon.address) as mine, daemon.client() as client:
        mine.forward(SYSTEM)
        prefix = client.publish_prefix(mine.id)
        assert prefix.tokens == 2 * PAGE
        assert ask(1002, daemon, QUESTIONS[0]) == (length, alone[0]), "the first session computes it"
        assert ask(1003, daemon, QUESTIONS[1]) == (length - 2 * PAGE, alone[1])
        assert client.status(check=True).integrity == []
    with daemon.client() as client:
        restart(client, warm=False)
        os.chmod(daemon.address, 0o666)
        assert client.prefixes() == [prefix]
        ask(1004, daemon, QUESTIONS[0])
        assert ask(1005, daemon, QUESTIONS[1]) == (length - 2 * PAGE, alone[1])
        assert client.withdraw_prefix(prefix.id)
        client.unload(MODEL)
        ask(1006, daemon, QUESTIONS[0])
        assert ask(1007, daemon, QUESTIONS[0]) == (length, alone[0]), "the prefix is no longer public"
        assert client.status(check=True).integrity == []
