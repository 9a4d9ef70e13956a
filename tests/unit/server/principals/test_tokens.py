"""Tokens in an event loop of the test's own, with connections that only remember."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from djinn_client.errors import DjinnError, InvalidRequest, NotAuthenticated, Retry
from djinn_client.protocol import AddToken
from djinnd.config import Limits
from djinnd.config.principals import number_of
from djinnd.server.principals import tokens
from djinnd.server.principals.tokens import Bearer, Tokens


class Connection:
    def __init__(self, bearer: Bearer | None) -> None:
        self.bearer = bearer
        self.dismissed: list[DjinnError] = []

    def dismiss(self, error: NotAuthenticated) -> None:
        self.dismissed.append(error)


def add(name: str = "ci", **fields: Any) -> AddToken:
    return AddToken(id=0, name=name, **fields)


def started(folder: Path, connections: list[Connection] | None = None) -> Tokens:
    made = Tokens(str(folder), Limits(tokens=3), lambda: connections or [])
    made.start()
    return made


def test_a_token_is_on_the_disk_before_it_is_told(tmp_path: Path) -> None:
    async def act() -> None:
        secret, info = await started(tmp_path).add(add(highest_class="agent"))
        assert (info.user, info.user_name, info.highest_class) == (number_of("ci"), "ci", "agent")
        assert started(tmp_path).authenticate(secret) == Bearer("ci", number_of("ci"), "agent")

    asyncio.run(act())


def test_a_unix_user_s_name_is_refused_without_that_user(tmp_path: Path) -> None:
    async def act() -> None:
        made = started(tmp_path)
        with pytest.raises(InvalidRequest, match="root is a Unix user"):
            await made.add(add("root"))
        _, info = await made.add(add("root", user="root"))
        assert (info.user, info.user_name) == (0, "root")

    asyncio.run(act())


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e10])
def test_times_that_are_none(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="expires_s"):
        asyncio.run(started(tmp_path).add(add(expires_s=seconds)))


def test_two_that_are_added_at_once_have_two_names(tmp_path: Path) -> None:
    async def act() -> None:
        made = started(tmp_path)
        results = await asyncio.gather(made.add(add()), made.add(add()), return_exceptions=True)
        assert {type(result) for result in results} == {tuple, InvalidRequest}  # threads decide which comes first

    asyncio.run(act())


def test_a_change_goes_on_when_its_caller_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write in a thread cannot be stopped, and a second one beside it would write to the same file."""

    async def act() -> None:
        made, begun, may_end = started(tmp_path), threading.Event(), threading.Event()
        await made.add(add("first"))

        def slow(fd: int) -> None:
            begun.set()
            assert may_end.wait(30)

        monkeypatch.setattr(os, "fsync", slow)
        given_up = asyncio.create_task(made.add(add("second")))
        await asyncio.to_thread(begun.wait, 30)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        begun.clear()
        revoked = asyncio.create_task(made.revoke("first"))
        await asyncio.sleep(0)
        assert not begun.is_set(), "it waits for the other one's write"
        revoked.cancel()
        may_end.set()
        await made.close()
        assert [info.name for info in made.infos()] == ["second"] == [info.name for info in started(tmp_path).infos()]

    asyncio.run(act())


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the file cannot be written, no token is added, but tokens can be revoked."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async def act() -> None:
        connection = Connection(Bearer("ci", 1, None))
        made = started(tmp_path, [connection])
        secret, _ = await made.add(add())
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(Retry, match="No space"):
                await made.add(add("other"))
            with pytest.raises(Retry, match="ci is revoked"):
                await made.revoke("ci")
        assert [info.name for info in made.infos()] == [] and connection.dismissed
        with pytest.raises(NotAuthenticated):
            made.authenticate(secret)
        await made.close()
        with pytest.raises(NotAuthenticated):
            started(tmp_path).authenticate(secret)

    asyncio.run(act())


def test_a_beat_ends_connections_whose_token_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        connections = [Connection(None)]
        made = started(tmp_path, connections)
        for name, seconds in (("brief", 10.0), ("long", 0.0)):
            secret, _ = await made.add(add(name, expires_s=seconds))
            connections.append(Connection(made.authenticate(secret)))
        made.beat()
        assert not any(each.dismissed for each in connections)
        now = tokens.time.time()
        monkeypatch.setattr(tokens.time, "time", lambda: now + 10.0)
        made.beat()
        assert [len(each.dismissed) for each in connections] == [0, 1, 0]

    asyncio.run(act())


def test_when_a_token_was_used_is_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        made = started(tmp_path)
        secret, _ = await made.add(add())
        made.authenticate(secret)
        made.beat()
        assert [info.used for info in started(tmp_path).infos()] == [None], "not at once"
        await made.close()
        assert started(tmp_path).infos() == made.infos() and made.infos()[0].used is not None

    asyncio.run(act())


def test_a_flood_of_guesses_is_two_lines_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        made = started(tmp_path)
        for _ in range(1000):
            with pytest.raises(NotAuthenticated):
                made.authenticate("djn_x")
        made.beat()
        now = tokens.time.monotonic()
        monkeypatch.setattr(tokens.time, "monotonic", lambda: now + tokens.TELL_REFUSALS_EVERY)
        made.beat()
        made.beat()

    asyncio.run(act())
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["tokens_refused count=1", "tokens_refused count=999"]
