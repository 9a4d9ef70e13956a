"""Old names do what they did, and warn."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

import djinn_client as djinn
from djinn_client.handover.saved_session import MAGIC
from djinn_client.protocol import (
    AddBreakpoint,
    BreakpointAdded,
    Done,
    Generate,
    GetTokens,
    PauseReply,
    PauseSession,
    Request,
    ResumeSession,
    TokenIds,
    Truncate,
)
from tests.support.scripted_daemon import Line, ScriptedDaemon
from tests.support.scripted_hits import AT, expect_close, finish, stop, take_edits


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Checkpoint", djinn.ResumePoint),
        ("attach", djinn.Session.attach),
        ("attach_async", djinn.AsyncSession.attach),
        ("from_kv", djinn.Session.from_kv),
        ("from_kv_async", djinn.AsyncSession.from_kv),
        ("resume", djinn.unpause),
    ],
)
def test_names_of_the_module(old: str, new: object) -> None:
    with pytest.warns(DeprecationWarning, match=f"djinn_client.{old} is ") as warned:
        assert getattr(djinn, old) == new
    assert warned[0].filename == __file__


def test_resume_of_a_hit_that_is_named(daemon: ScriptedDaemon) -> None:
    calls: list[Generate] = []

    def script(line: Line) -> None:
        line.open_session()
        stop(line)
        finish(line)
        line.send(Done(id=line.expect(Truncate).id))
        take_edits(line)
        calls.append(finish(line))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        hit = s.run("text")
        s.resume()
        with pytest.warns(DeprecationWarning, match=r"resume\(from_=hit\) is resume_from\(hit\) now") as warned:
            assert isinstance(s.resume(from_=hit, max_tokens=3), djinn.Generated)  # type: ignore[call-arg]
    assert warned[0].filename == __file__
    assert calls[0].hit == AT and calls[0].max_tokens == 3


def test_resume_of_a_paused_session(daemon: ScriptedDaemon) -> None:
    requests: list[Request] = []

    def script(line: Line) -> None:
        line.open_session()
        expect_close(line)

    def beside(line: Line) -> None:
        line.welcome()
        request = line.receive()
        assert isinstance(request, PauseSession | ResumeSession)
        requests.append(request)
        is_pause = isinstance(request, PauseSession)
        line.send(
            PauseReply(id=request.id, tier="host", pages=0, nbytes=0, seconds=0.0) if is_pause else Done(id=request.id)
        )
        line.expect_hang_up()

    with djinn.Session("djinn-tiny", address=daemon.play(script, beside)) as s:
        s.pause()
        with pytest.warns(DeprecationWarning, match=r"unpause\(\)"):
            assert cast(Any, s.resume()) is None
        with pytest.raises(djinn.SessionStateError):
            s.resume()
    assert [type(request) for request in requests] == [PauseSession, ResumeSession]


def test_unpausing_a_session_by_its_id(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        line.send(Done(id=line.expect(ResumeSession).id))
        line.expect_hang_up()

    with djinn.Client(daemon.play(script)) as client, pytest.warns(DeprecationWarning, match="unpause_session"):
        client.resume_session("s-1")


def test_token_ids_as_a_property(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        for _ in range(5):
            line.send(TokenIds(id=line.expect(GetTokens).id, token_ids=[4, 5]))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        read = cast(Any, s.token_ids)
        for reading in (len, sum, lambda tokens: tokens[1:], lambda tokens: tokens == [4, 5]):
            with pytest.warns(DeprecationWarning, match=r"a method, token_ids\(\) now") as warned:
                assert reading(read)
            assert warned[0].filename == __file__
        assert s.token_ids() == [4, 5]


def test_token_ids_as_an_awaited_property(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        line.send(TokenIds(id=line.expect(GetTokens).id, token_ids=[4]))
        expect_close(line)

    async def main(address: str) -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            with pytest.warns(DeprecationWarning, match="token_ids"):
                assert await cast(Any, s.token_ids) == [4]

    asyncio.run(main(daemon.play(script)))


def test_a_breakpoint_that_always_stops(daemon: ScriptedDaemon) -> None:
    requests: list[AddBreakpoint] = []

    def script(line: Line) -> None:
        line.open_session()
        requests.append(line.expect(AddBreakpoint))
        line.send(BreakpointAdded(id=requests[0].id, breakpoint=1))
        expect_close(line)

    address = daemon.play(script)
    with djinn.Session("djinn-tiny", address=address) as s, pytest.warns(DeprecationWarning, match="every") as warned:
        s.breakpoint(layer=1, when="always")
    assert requests[0].when == "every" and warned[0].filename == __file__


def test_load_of_a_saved_session(tmp_path: Path) -> None:
    (tmp_path / "s.djinn").write_bytes(MAGIC)
    with pytest.warns(DeprecationWarning, match="load_session") as warned, pytest.raises(djinn.FileDamaged):
        djinn.load(str(tmp_path / "s.djinn"))
    assert warned[0].filename == __file__
