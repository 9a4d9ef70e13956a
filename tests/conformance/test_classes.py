"""Classes, hints and explanations of sessions change no token."""

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


async def info_of(api: Api, s: Session) -> djinn.SessionInfo:
    listed = await asyncio.to_thread(djinn.sessions, address=api.address)
    return next(info for info in listed if info.id == s.id)


async def test_a_class_may_change_at_any_time(api: Api, session: Opener, story: list[int]) -> None:
    async with session(priority="agent") as s:
        await s.set_priority("batch")
        assert (await info_of(api, s)).priority == "batch"
        tokens = []
        async for piece in s.stream(PROMPT, max_tokens=COUNT, ignore_eos=True):
            tokens += piece.token_ids
            await s.set_priority("interactive" if len(tokens) % 2 else "agent")
        assert (await info_of(api, s)).priority in ("interactive", "agent")
        fork = await s.fork()
        assert fork.info.priority == (await info_of(api, s)).priority
        await fork.close()
    assert tokens == story


async def test_there_is_no_other_class(session: Opener) -> None:
    async with session() as s:
        with pytest.raises(InvalidRequest):
            await s.set_priority("urgent")  # type: ignore[arg-type]


async def test_an_idle_session_says_so(api: Api, session: Opener) -> None:
    async with session() as s:
        told = await s.why()
        assert (told.state, told.ahead, told.others_ahead) == ("idle", [], 0)
        assert told.reason
        assert await asyncio.to_thread(djinn.why, s.id, address=api.address) == told


async def test_a_paused_session_says_so_and_whose_call_waits(session: Opener, story: list[int]) -> None:
    async with session() as s:
        await s.pause()
        call = asyncio.create_task(s.generate(PROMPT, max_tokens=COUNT, ignore_eos=True))
        assert (await s.why()).state == "paused"
        await s.unpause()
        assert (await call).token_ids == story
        assert (await s.why()).state == "idle"


async def test_a_session_that_is_closed_has_neither(api: Api, session: Opener) -> None:
    async with session() as s:
        pass
    with pytest.raises(SessionNotFound):
        await asyncio.to_thread(djinn.why, s.id, address=api.address)
    with pytest.raises(SessionNotFound):
        await asyncio.to_thread(djinn.set_priority, s.id, "batch", address=api.address)


async def test_hints_change_no_token(session: Opener, story: list[int]) -> None:
    async with session() as s:
        await s.signal("PREFILL")
        hints = {"expected_tokens": 5, "deadline_s": 0.001, "between_tokens_s": 0.0, "first_token_s": 0.1}
        tokens = (await s.generate(PROMPT, max_tokens=COUNT // 2, ignore_eos=True, **hints)).token_ids
        await s.signal("DECODE")
        async with s.io_wait(tool="search"):
            pass
        tokens += (await s.generate(max_tokens=COUNT // 2, ignore_eos=True, deadline_s=60.0)).token_ids
    assert tokens == story


async def test_wrong_hints_are_told(session: Opener) -> None:
    async with session() as s:
        for hints in ({"expected_tokens": -1}, {"deadline_s": -1.0}, {"deadline_s": 1e6}, {"first_token_s": 1e-6}):
            with pytest.raises(InvalidRequest, match=next(iter(hints))):
                await s.generate(PROMPT, max_tokens=1, **hints)
        with pytest.raises(InvalidRequest, match="tool"):
            await s.signal("COMPUTE", tool="search")
