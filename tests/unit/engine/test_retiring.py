"""A model that goes to sleep: its pages move to the host while other models step, and the model leaves the device. Then
it is loaded again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from djinnd import messages
from djinnd.kvcache.moves import Transfer
from tests.support.tiered import FOLDER, NEW, PROMPT, TIER, Tiered, expected, tiered


@pytest.fixture
def engine() -> Iterator[Tiered]:
    with tiered() as engine:
        yield engine


def retire(engine: Tiered) -> None:
    engine.send(messages.Unload(77, "m", keep_pages=True))


def load_again(engine: Tiered, before: Tiered | None = None) -> None:
    """Loads the model from the arena that this engine, or the engine before it, has filled. Returns when its tiers are
    set up."""
    weights, pages = (before or engine).arenas[-2:]

    def grant(need: messages.NeedArena) -> messages.ArenaReady:
        return messages.ArenaReady(need.request, weights.name, offset=4096, complete=True)

    reply = engine.load(FOLDER, grant=grant, host_kv_bytes=TIER)
    assert isinstance(reply, messages.Loaded)
    need = engine.until(messages.NeedArena)
    engine.send(messages.ArenaReady(need.request, pages.name, offset=4096, complete=True))
    while not engine.report().models[0].host_pages:
        pass


def test_a_retired_model_leaves_the_device_and_its_pages_are_found_by_the_next_load(engine: Tiered) -> None:
    tokens = engine.ran("s")
    engine.open("t")
    engine.ran("t", [*PROMPT, 9])
    retire(engine)
    engine.until(messages.Unloaded)
    report = engine.report()
    assert (report.models, report.sessions, report.used_bytes) == ([], [], 0)
    load_again(engine)
    (info,) = engine.report().models
    assert info.host_pages_used == 4, "three, and another last one"
    engine.open("s", tokens=[*PROMPT, *tokens])
    number = engine.run("s", [5], NEW)
    more, reply = engine.outcome(number)
    assert more == expected([*PROMPT, *tokens, 5])
    assert isinstance(reply, messages.Finished) and reply.computed == 2, "the last token of before, and the new one"


def test_pages_that_had_left_before_are_found_too(engine: Tiered) -> None:
    tokens = engine.ran("s")
    engine.send(messages.Signal("s", waits=True))
    engine.use_when("s", "waiting", on_device=False)
    engine.paused("s")
    retire(engine)
    engine.until(messages.Unloaded)
    load_again(engine)
    engine.open("s", tokens=[*PROMPT, *tokens])
    more, reply = engine.outcome(engine.run("s", [5], NEW))
    assert more == expected([*PROMPT, *tokens, 5])
    assert isinstance(reply, messages.Finished) and reply.computed == 2


def test_an_arriving_session_leaves_again(engine: Tiered) -> None:
    tokens = engine.ran("s")
    engine.paused("s")
    engine.send(messages.Resume("s"), messages.Signal("s", waits=False), messages.Unload(77, "m", keep_pages=True))
    engine.until(messages.Unloaded)
    load_again(engine)
    engine.open("s", tokens=[*PROMPT, *tokens])
    assert engine.ran("s", [5]) == expected([*PROMPT, *tokens, 5])


def test_other_models_run_while_the_pages_leave(engine: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.ran("s")
    engine.loaded(FOLDER, "other")
    engine.open("o", "other")
    transfers, may_land = engine.transfers(), threading.Event()
    end = transfers.end

    def ended_late() -> list[Transfer]:
        return end() if may_land.is_set() else []

    monkeypatch.setattr(transfers, "end", ended_late)
    retire(engine)
    assert engine.ran("o") == expected()
    assert [info.name for info in engine.report().models] == ["m", "other"]
    assert [use.session for use in engine.report().sessions] == ["o"], "its sessions are closed at once"
    may_land.set()
    engine.until(messages.Unloaded)
    assert [info.name for info in engine.report().models] == ["other"]


def test_pages_are_dropped_without_a_host_tier() -> None:
    with Tiered() as engine:
        engine.loaded(FOLDER)
        engine.open("s")
        tokens = engine.ran("s")
        retire(engine)
        engine.until(messages.Unloaded)
        engine.loaded(FOLDER)
        engine.open("s", tokens=[*PROMPT, *tokens])
        assert engine.ran("s", [5]) == expected([*PROMPT, *tokens, 5])


def test_a_model_without_sessions_retires_at_once(engine: Tiered) -> None:
    engine.send(messages.Close("s"))
    retire(engine)
    engine.until(messages.Unloaded)
    assert engine.report().used_bytes == 0


def test_the_engine_may_end_during_retirement() -> None:
    with Tiered(max_batch_tokens=256) as first, Tiered(max_batch_tokens=256) as second:
        first.load_with_tiers()
        first.open("s")
        tokens = first.ran("s")
        first.send(messages.Unload(77, "m", keep_pages=True), messages.Shutdown(keep_pages=True))
        first.join()
        load_again(second, first)
        second.open("s", tokens=[*PROMPT, *tokens])
        more, reply = second.outcome(second.run("s", [5], NEW))
        assert more == expected([*PROMPT, *tokens, 5])
        assert isinstance(reply, messages.Finished) and reply.computed == 2
