"""Waits and pauses of sessions change no token."""

from __future__ import annotations

import asyncio

import pytest

import djinn_client as djinn
from djinn_client.errors import InvalidRequest, SessionNotFound

from .conftest import Api, Session
from .conftest import OpenSession as Opener

PROMPT = "def fibonacci("
COUNT = 64


@pytest.fixture(scope="module")
def story(daemon_address: str, model: djinn.ModelInfo) -> list[int]:
    """The tokens of an undisturbed session."""
    with djinn.Session(model.name, address=daemon_address) as s:
        return s.generate(PROMPT, max_tokens=COUNT, ignore_eos=True).token_ids


async def state_of(api: Api, s: Session) -> str:
    listed = await asyncio.to_thread(djinn.sessions, address=api.address)
    return next(info.state for info in listed if info.id == s.id)


async def test_waiting_between_two_calls(session: Opener, story: list[int]) -> None:
    async with session(priority="agent") as s:
        tokens = (await s.generate(PROMPT, max_tokens=COUNT // 2, ignore_eos=True)).token_ids
        async with s.io_wait(expected_s=0.05):
            await asyncio.sleep(0.05)
        tokens += (await s.generate(max_tokens=COUNT // 2, ignore_eos=True)).token_ids
    assert tokens == story


async def test_any_order_of_signals_does_no_harm(session: Opener, story: list[int]) -> None:
    async with session() as s:
        for kind in ("COMPUTE", "IO_WAIT", "IO_WAIT", "COMPUTE", "IO_WAIT"):
            await s.signal(kind)
        tokens = []
        async for piece in s.stream(PROMPT, max_tokens=COUNT, ignore_eos=True):
            tokens += piece.token_ids
            await s.signal("IO_WAIT" if len(tokens) % 2 else "COMPUTE")
    assert tokens == story


async def test_wrong_signals_stay_with_the_caller(session: Opener) -> None:
    async with session() as s:
        with pytest.raises(InvalidRequest):
            await s.signal("SLEEP")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await s.signal("IO_WAIT", expected_s=float("nan"))


async def test_a_stream_that_is_paused_goes_on_where_it_stopped(api: Api, session: Opener, story: list[int]) -> None:
    async with session() as s:
        stream = s.stream(PROMPT, max_tokens=COUNT, ignore_eos=True)
        tokens = (await anext(stream)).token_ids
        paused = await s.pause()
        assert paused.tier == "host"
        assert await state_of(api, s) == "paused"
        await s.unpause()
        async for piece in stream:
            tokens += piece.token_ids
    assert tokens == story


async def test_a_call_on_a_paused_session_waits_for_its_end(api: Api, session: Opener, story: list[int]) -> None:
    async with session() as s, session() as other:
        await s.pause()
        call = asyncio.create_task(s.generate(PROMPT, max_tokens=COUNT, ignore_eos=True))
        assert (await other.generate(PROMPT, max_tokens=COUNT, ignore_eos=True)).token_ids == story
        assert not call.done() and await state_of(api, s) == "paused"
        await s.unpause()
        assert (await call).token_ids == story


async def test_closing_a_paused_session(api: Api, session: Opener) -> None:
    async with session() as s:
        await s.pause()
    for call in (djinn.pause, djinn.unpause):
        with pytest.raises(SessionNotFound):
            await asyncio.to_thread(call, s.id, address=api.address)


async def test_there_is_no_pausing_on_the_device(session: Opener) -> None:
    async with session() as s:
        with pytest.raises(InvalidRequest, match="leave the device"):
            await s.pause(tier="device")
