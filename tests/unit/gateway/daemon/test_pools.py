from __future__ import annotations

import asyncio
import threading

import pytest

from djinn_client.errors import NotAuthenticated
from djinn_client.protocol import Cancel, CloseSession, Done, OpenSession
from djinnd.gateway.daemon import pools
from djinnd.gateway.daemon.pools import Daemon
from djinnd.gateway.daemon.refused_tokens import RefusedTokens
from tests.support.scripted_daemon import Line, ScriptedDaemon

TOKEN = "djn_a"


def idle(line: Line) -> None:
    line.welcome()
    line.expect_hang_up()


def test_two_first_requests_of_a_token_share_one_pool(daemon: ScriptedDaemon) -> None:
    address = daemon.play(idle)

    async def main() -> None:
        known = Daemon(address, RefusedTokens())
        first, second = await asyncio.gather(known.pool(TOKEN), known.pool(TOKEN))
        assert first is second
        known.close()

    asyncio.run(main())  # and the script of each connection sees its end


def test_a_connection_is_closed_when_it_has_been_unused_for_long(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "IDLE_S", 0.05)
    ended = threading.Event()

    def script(line: Line) -> None:
        idle(line)
        ended.set()

    async def main() -> None:
        await Daemon(address, RefusedTokens()).pool(TOKEN)
        assert await asyncio.to_thread(ended.wait, 60)

    address = daemon.play(script)
    asyncio.run(main())


def test_the_daemon_is_not_asked_again_for_a_token_that_it_has_just_refused(daemon: ScriptedDaemon) -> None:
    address = daemon.play(Line.refuse, never)

    async def main() -> None:
        known = Daemon(address, RefusedTokens())
        for _ in range(3):
            with pytest.raises(NotAuthenticated):
                await known.pool(TOKEN)

    asyncio.run(main())


def never(line: Line) -> None:
    pytest.fail("the daemon was asked again")


def test_a_client_that_goes_while_its_session_opens_leaves_none_behind(daemon: ScriptedDaemon) -> None:
    asked = threading.Event()

    def script(line: Line) -> None:
        line.welcome()
        line.expect(OpenSession)
        asked.set()
        assert isinstance(line.receive(), Cancel | None)
        line.expect_hang_up()

    async def use(known: Daemon) -> None:
        async with (await known.pool(TOKEN)).link() as link, link.session("m"):
            pass

    async def main() -> None:
        known = Daemon(address, RefusedTokens())
        task = asyncio.create_task(use(known))
        await asyncio.to_thread(asked.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        known.close()

    address = daemon.play(script)
    asyncio.run(main())


def test_a_session_is_closed_when_its_task_is_cancelled(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        line.send(Done(id=line.expect(CloseSession).id))
        line.expect_hang_up()

    async def use(known: Daemon, begun: asyncio.Event) -> None:
        async with (await known.pool(TOKEN)).link() as link, link.session("m"):
            begun.set()
            await asyncio.Event().wait()

    async def main() -> None:
        known, begun = Daemon(address, RefusedTokens()), asyncio.Event()
        task = asyncio.create_task(use(known, begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        known.close()

    address = daemon.play(script)
    asyncio.run(main())
