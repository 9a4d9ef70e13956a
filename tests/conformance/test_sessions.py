"""The life of a session: opened, found, attached, busy, closed; and the errors for sessions that do not exist."""

from __future__ import annotations

import asyncio

import pytest

import djinn_client as djinn
from djinn_client.arguments.options import build
from djinn_client.errors import (
    InvalidRequest,
    ModelNotFound,
    SessionBusy,
    SessionNotFound,
)
from djinn_client.protocol import CloseSession, Done, OpenSession, SessionOpened
from djinn_client.transport.connection import connect
from djinn_client.transport.steps import run

from .conftest import MODEL, Api
from .conftest import OpenSession as Opener

UNKNOWN = "no-such-session"
PROMPT = "def fibonacci("
NO_END = 1900  # tokens: nearly the whole context, which takes seconds


async def test_an_open_session_describes_its_model_and_class(session: Opener, api: Api) -> None:
    async with session(priority="agent") as s:
        assert (s.info.id, s.info.model, s.info.priority, s.info.tokens) == (s.id, MODEL, "agent", 0)
        assert await s.token_ids() == []
        listed = {info.id: info for info in await asyncio.to_thread(djinn.sessions, address=api.address)}
        assert listed[s.id].priority == "agent"
        assert listed[s.id].attached == 1
    listed = {info.id: info for info in await asyncio.to_thread(djinn.sessions, address=api.address)}
    assert s.id not in listed


async def test_ids_are_not_given_twice(session: Opener) -> None:
    async with session() as a, session() as b:
        assert a.id != b.id


async def test_an_unknown_model(api: Api) -> None:
    with pytest.raises(ModelNotFound, match="nonesuch"):
        await api.open("nonesuch")


async def test_a_class_that_does_not_exist(api: Api) -> None:
    with pytest.raises(InvalidRequest, match="urgent"):
        await api.open(priority="urgent")


async def test_attaching_to_an_unknown_session(api: Api) -> None:
    with pytest.raises(SessionNotFound):
        await api.attach(UNKNOWN)


async def test_closing_an_unknown_session(api: Api) -> None:
    with pytest.raises(SessionNotFound):
        await asyncio.to_thread(djinn.close, UNKNOWN, address=api.address)


async def test_closing_twice(api: Api) -> None:
    s = await api.open()
    await s.close()
    await s.close()  # the object knows
    with pytest.raises(SessionNotFound):  # and so does the daemon
        await asyncio.to_thread(djinn.close, s.id, address=api.address)
    with pytest.raises(SessionNotFound):
        await api.attach(s.id)


def test_closing_twice_on_one_connection(daemon_address: str) -> None:
    connection = run(connect(daemon_address))
    opened = run(connection.call(build(OpenSession, model=MODEL), SessionOpened)).message.session
    run(connection.call(build(CloseSession, session=opened.id), Done))
    for _ in range(2):
        with pytest.raises(SessionNotFound):
            run(connection.call(build(CloseSession, session=opened.id), Done))
    connection.close()


async def test_every_call_on_a_session_that_somebody_else_has_closed(api: Api) -> None:
    s = await api.open()
    await asyncio.to_thread(djinn.close, s.id, address=api.address)
    for call in (s.generate(PROMPT), s.forward([1]), s.truncate(0), s.fork(), s.token_ids(), anext(s.stream(PROMPT))):
        with pytest.raises(SessionNotFound):
            await call
    await s.close()


async def test_a_detached_session_goes_on_where_it_was(api: Api) -> None:
    s = await api.open()
    first = await s.generate(PROMPT, max_tokens=8)
    tokens = await s.token_ids()
    await s.detach()
    again = await api.attach(s.id)
    assert again.info.tokens == len(tokens)
    assert await again.token_ids() == tokens
    second = await again.generate(max_tokens=8)
    await again.close()
    whole = await api.open()
    assert (await whole.generate(PROMPT, max_tokens=16)).token_ids == first.token_ids + second.token_ids
    await whole.close()


async def test_two_connections_share_a_session(api: Api, session: Opener) -> None:
    async with session() as s:
        other = await api.attach(s.id)
        await s.generate(PROMPT, max_tokens=4)
        assert await other.token_ids() == await s.token_ids()
        await other.detach()
        assert len(await s.token_ids()) > 4


async def test_a_fork_goes_on_as_its_parent_would_have(session: Opener) -> None:
    async with session(priority="agent") as s:
        await s.generate(PROMPT, max_tokens=8, ignore_eos=True)
        t = await s.fork()
        u = await t.fork(priority="batch")
        assert len({s.id, t.id, u.id}) == 3
        assert (t.info.priority, u.info.priority, u.info.tokens) == ("agent", "batch", len(await s.token_ids()))
        calls = [each.generate(max_tokens=8, ignore_eos=True) for each in (s, t, u)]
        replies = [reply.token_ids for reply in await asyncio.gather(*calls)]
        assert replies[0] == replies[1] == replies[2]
        await t.truncate(3)
        assert len(await t.token_ids()) == 3 and len(await u.token_ids()) == len(await s.token_ids()) > 3
        await t.close()
        assert len((await u.generate(max_tokens=2, ignore_eos=True)).token_ids) == 2
        await u.close()


async def test_a_session_at_work_is_not_forked(api: Api, session: Opener) -> None:
    async with session() as s:
        other = await api.attach(s.id)
        stream = s.stream(PROMPT, max_tokens=NO_END, ignore_eos=True)
        await anext(stream)
        with pytest.raises(SessionBusy):
            await other.fork()
        stream.close()
        await other.detach()


async def test_one_call_at_a_time(api: Api, session: Opener) -> None:
    async with session() as s:
        other = await api.attach(s.id)
        stream = s.stream(PROMPT, max_tokens=NO_END, ignore_eos=True)
        await anext(stream)
        with pytest.raises(SessionBusy):
            await other.generate(max_tokens=1)
        with pytest.raises(SessionBusy):
            await other.truncate(0)
        stream.close()
        assert len(await s.token_ids()) > 0  # the daemon's last word on the stream has come
        assert len((await other.generate(max_tokens=2, ignore_eos=True)).token_ids) == 2
        await other.detach()


async def test_closing_a_session_ends_the_call_that_runs_on_it(api: Api) -> None:
    s = await api.open()
    stream = s.stream(PROMPT, max_tokens=NO_END, ignore_eos=True)
    await anext(stream)
    await asyncio.to_thread(djinn.close, s.id, address=api.address)
    try:
        async for _ in stream:
            pass
    except djinn.DjinnError:
        pass
    else:
        assert stream.result.finish_reason == "cancelled"
    with pytest.raises(SessionNotFound):
        await s.generate(PROMPT)
    await s.close()


async def test_status_and_models_know_what_is_there(api: Api, session: Opener, model: djinn.ModelInfo) -> None:
    before = await asyncio.to_thread(djinn.status, address=api.address)
    async with session(priority="batch") as s:
        await s.generate(PROMPT, max_tokens=1)
        status = await asyncio.to_thread(djinn.status, address=api.address)
        (listed,) = [m for m in await asyncio.to_thread(djinn.models, address=api.address) if m.name == MODEL]
    assert status.state == "ready"
    assert status.sessions["batch"] == before.sessions.get("batch", 0) + 1
    assert listed.state == "ready"
    assert (listed.vocab, listed.max_context) == (model.vocab, model.max_context)
    assert sum(device.generated_tokens for device in status.devices) > 0


def test_a_client_keeps_one_connection_for_many_calls(daemon_address: str) -> None:
    with djinn.Client(daemon_address) as client:
        for _ in range(10):
            client.ping()
        assert client.welcome().version == client.status().version
