"""Captures, edits and breakpoints: properties that hold for every model."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import djinn_client as djinn
from djinn_client.errors import InvalidRequest, SessionBusy, SessionNotFound

from .conftest import MODEL, Api, Session
from .conftest import OpenSession as Opener

PROMPT = "class Stack(object):\n    def pop(self):\n        return"
NO_END = 1900  # tokens: nearly the whole context, which takes seconds
NEW = 8
MIDDLE = "blocks.4.hook_resid_post"


async def told(s: Session, prompt: str | None = None) -> list[int]:
    return (await s.generate(prompt, max_tokens=NEW, ignore_eos=True)).token_ids


@pytest.fixture(scope="session")
def points(daemon_address: str) -> list[str]:
    return djinn.points(MODEL, address=daemon_address)


@pytest.fixture(scope="session")
def vector(model: djinn.ModelInfo) -> Any:
    assert model.points is not None
    return np.random.default_rng(1).normal(0, 3, model.points.width).astype(np.float32)


async def test_points_are_what_can_be_captured(session: Opener, points: list[str], model: djinn.ModelInfo) -> None:
    async with session() as s:
        cache = await s.capture(points).run(PROMPT)
        length = len(await s.token_ids())
    assert list(cache) == [name for name in points if name in list(cache)]  # in their order, and what is the same once
    assert len(cache) == len({id(cache[name]) for name in points}) == 3 * model.blocks + 3
    for name in points:
        width = model.vocab if name == "logits" else model.points.width if model.points else 0
        assert tuple(cache[name].shape) == (1, length, width), name
    assert cache.positions == range(length) and cache.generated.token_ids == []


async def test_looking_changes_nothing(session: Opener, points: list[str]) -> None:
    async with session() as s, session() as t:
        cache = await s.capture(points).run(PROMPT, max_tokens=NEW, ignore_eos=True)
        assert cache.generated.token_ids == await told(t, PROMPT)
        assert await told(s) == await told(t)


async def test_patching_equal_activations_changes_nothing(session: Opener) -> None:
    async with session() as s, session() as t:
        cache = await s.capture("blocks.*.hook_resid_post").run(PROMPT)
        for activation in cache.values():
            await t.patch(activation)
        again = await t.capture("blocks.*.hook_resid_post").run(PROMPT)
        for name, activation in cache.items():
            np.testing.assert_allclose(np.asarray(again[name]), np.asarray(activation), rtol=0, atol=1e-5)
        assert await told(t) == await told(s)


async def test_an_edit_until_it_is_removed(session: Opener, vector: Any) -> None:
    async with session() as s, session() as bystander:
        plain = await told(bystander, PROMPT)
        edit = await s.steer(MIDDLE, vector, scale=4.0)
        assert await told(s, PROMPT) != plain
        (info,) = await s.edits()
        assert (info.id, info.op, info.points, info.spans) == (edit.id, "add", [MIDDLE], [(0, None)])
        await s.truncate(0)
        await edit.remove()
        assert await s.edits() == []
        assert await told(s, PROMPT) == plain


async def test_an_edit_of_nothing(session: Opener, vector: Any) -> None:
    """Adding no part of a vector, scaling by one, a bound that nothing comes to."""
    async with session() as s, session() as t:
        await s.steer(MIDDLE, vector, scale=0.0)
        await s.steer(MIDDLE, op="scale", scale=1.0)
        await s.steer(MIDDLE, vector, op="clamp", low=-1e6, high=1e6)
        assert await told(s, PROMPT) == await told(t, PROMPT)


async def test_an_edit_shows_in_what_is_captured_there(session: Opener, vector: Any) -> None:
    async with session() as s, session() as t:
        await s.steer(MIDDLE, vector, positions=[2, 3])
        edited = np.asarray((await s.capture(MIDDLE).run(PROMPT))[MIDDLE])
        plain = np.asarray((await t.capture(MIDDLE).run(PROMPT))[MIDDLE])
    np.testing.assert_allclose(edited[0, 2:4], plain[0, 2:4] + vector, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(edited[0, :2], plain[0, :2], rtol=1e-5, atol=1e-5)


async def test_a_fork_goes_its_own_way(session: Opener, vector: Any) -> None:
    async with session() as s:
        await s.steer(MIDDLE, vector, scale=4.0)
        await told(s, PROMPT)
        t = await s.fork()
        try:
            assert await t.edits() == await s.edits() != []
            await t.unsteer()
            assert (await t.edits())[0].spans != (await s.edits())[0].spans
            await s.unsteer((await s.edits())[0].id)
            assert await t.edits() == await s.edits()
            assert await told(t) == await told(s)
        finally:
            await t.close()


async def test_a_session_in_a_call_is_busy(api: Api, session: Opener, vector: Any) -> None:
    """For others that are attached to it, too."""
    async with session() as s:
        stream = s.stream(PROMPT, max_tokens=NO_END, ignore_eos=True)
        await anext(stream)
        other = await api.attach(s.id)
        for call in (
            lambda: s.steer(MIDDLE, vector),
            lambda: s.unsteer(),
            lambda: other.steer(MIDDLE, vector),
            lambda: other.unsteer(),
            lambda: other.capture(MIDDLE).run(),
        ):
            with pytest.raises(SessionBusy):
                await call()
        stream.close()
        await other.detach()


async def test_sessions_that_are_gone(api: Api, vector: Any) -> None:
    s = await api.open()
    await asyncio.to_thread(djinn.close, s.id, address=api.address)
    for call in (
        lambda: s.steer(MIDDLE, vector),
        lambda: s.edits(),
        lambda: s.unsteer(),
        lambda: s.capture(MIDDLE).run(PROMPT),
    ):
        with pytest.raises(SessionNotFound):
            await call()
    await s.close()


@pytest.mark.parametrize(
    "name", ["", "blocks", "blocks.8", "model.layers.3.mlpp", "blocks.*.*", "logits\0", "é" * 1000]
)
async def test_unknown_points_are_refused(session: Opener, vector: Any, name: str) -> None:
    async with session() as s:
        for call in (lambda: s.steer(name, vector), lambda: s.capture(name).run(PROMPT)):
            with pytest.raises(InvalidRequest):
                await call()
        assert await s.token_ids() == []


async def test_a_capture_ends_where_the_text_ends(session: Opener) -> None:
    async with session() as s:
        cache = await s.capture(["logits", MIDDLE]).run(PROMPT, max_tokens=100, stop=".")
        tokens = await s.token_ids()
        assert cache.generated.finish_reason == "stop" and len(cache.generated.token_ids) < 100
        assert cache.positions == range(len(tokens) - 1)
        chosen = np.asarray(cache["logits"])[0].argmax(axis=-1)
        prompt = len(tokens) - len(cache.generated.token_ids)
        assert chosen[prompt - 1 :].tolist() == cache.generated.token_ids


async def test_a_capture_of_an_empty_session_has_nothing_to_run(session: Opener) -> None:
    async with session() as s:
        with pytest.raises(InvalidRequest):
            await s.capture(MIDDLE).run()
