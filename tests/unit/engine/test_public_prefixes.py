"""Two tenants of one engine: the prompt tokens that the second one computes, see Finished.computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from djinnd import messages
from tests.support import reference
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model

FOLDER = reduced_model("llama-2")
ALICE, BOB, CAROL = 1000, 1001, 1002
PAGE = 256
SYSTEM = random_prompt(2 * PAGE + 40, 512, seed=1)  # two full pages, and a rest that is never public
ALICES, BOBS = (SYSTEM + random_prompt(30, 512, seed) for seed in (2, 3))
NEW = 6
PAGE_BYTES = 512 << 10


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    with EngineThread(max_batch_tokens=512) as engine:
        assert engine.loaded(FOLDER).page_size == PAGE
        yield engine


def mark(engine: EngineThread, tokens: list[int] = SYSTEM) -> None:
    engine.send(messages.PublicPrefix("m", tokens))


def ask(engine: EngineThread, session: str, tenant: int, prompt: list[int]) -> int:
    """Opens a session and checks that it gets the same tokens as alone. → the prompt tokens that were computed."""
    engine.open(session, tenant=tenant)
    return go_on(engine, session, prompt, prompt)


def go_on(engine: EngineThread, session: str, text: list[int], prompt: list[int]) -> int:
    """`text`: all tokens of the session after this."""
    tokens, reply = engine.outcome(engine.run(session, prompt, NEW))
    assert isinstance(reply, messages.Finished)
    assert tokens == reference.greedy(FOLDER, text, NEW)
    return reply.computed


def pages_used(engine: EngineThread) -> int:
    (model,) = engine.report().models
    return model.pages_used


def test_a_tenant_reuses_another_tenant_s_pages_of_a_public_prefix(engine: EngineThread) -> None:
    assert ask(engine, "a", ALICE, ALICES) == len(ALICES)
    assert ask(engine, "b", BOB, BOBS) == len(BOBS), "nobody has marked it"
    assert pages_used(engine) == 6
    mark(engine)
    assert ask(engine, "a2", ALICE, BOBS) == len(BOBS) - 2 * PAGE, "its own pages of before"
    engine.send(messages.Close("a"), messages.Close("a2"), messages.Close("b"))
    assert pages_used(engine) == 0
    assert ask(engine, "c", CAROL, ALICES) == len(ALICES)
    assert ask(engine, "c2", CAROL, BOBS) == len(BOBS) - 2 * PAGE
    assert ask(engine, "d", CAROL + 1, ALICES) == len(ALICES) - 2 * PAGE
    assert ask(engine, "e", BOB, BOBS) == len(BOBS) - 2 * PAGE
    assert pages_used(engine) == 2 + 4, "the prefix once, and a page of each"


def test_tokens_after_the_public_prefix_are_not_shared(engine: EngineThread) -> None:
    mark(engine, SYSTEM[: PAGE + 10])
    assert ask(engine, "a", ALICE, ALICES) == len(ALICES)
    assert ask(engine, "b", BOB, ALICES) == len(ALICES) - PAGE, "the same prompt"
    assert ask(engine, "c", ALICE, ALICES) == len(ALICES) - 2 * PAGE
    left = [*SYSTEM[: PAGE - 1], *BOBS[:PAGE]]
    assert ask(engine, "d", BOB, left) == len(left), "it leaves the prefix in the middle of a page"


def test_a_session_from_before_the_mark_keeps_its_pages(engine: EngineThread) -> None:
    assert ask(engine, "a", ALICE, ALICES) == len(ALICES)
    mark(engine)
    text = [*ALICES, *reference.greedy(FOLDER, ALICES, NEW), 5]
    assert go_on(engine, "a", text, [5]) == 2, "the token and the last one of before"
    assert ask(engine, "b", BOB, BOBS) == len(BOBS)


# --- lower tiers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiered() -> Iterator[EngineThread]:
    """An engine with few pages on the device, and a host tier."""
    with EngineThread(max_batch_tokens=512) as engine:
        info = engine.loaded(FOLDER, kv_bytes=9 * PAGE_BYTES, host_kv_bytes=32 * PAGE_BYTES)
        assert (info.pages, info.page_bytes) == (8, PAGE_BYTES)
        engine.send(engine.grant(engine.until(messages.NeedArena)))
        while not engine.report().models[0].host_pages:
            pass
        yield engine


def demote(engine: EngineThread, *sessions: str) -> None:
    """Pauses the sessions: all their pages are on the host then, and none on the device."""
    for session in sessions:
        request = engine.number()
        engine.send(messages.Pause(request, session, "host"))
        assert engine.until(messages.Paused).request == request
    assert pages_used(engine) == 0


def forget_device(engine: EngineThread) -> None:
    """Another session computes until no page of the device has its old contents."""
    (model,) = engine.report().models
    engine.open("filler", tenant=7)
    filler = random_prompt(model.pages * PAGE - 1, 512, seed=9)
    _, reply = engine.outcome(engine.run("filler", filler, 1))
    assert isinstance(reply, messages.Finished)
    engine.send(messages.Close("filler"))
    assert pages_used(engine) == 0


def host_pages(engine: EngineThread) -> int:
    return engine.report().models[0].host_pages_used


def test_tenants_find_public_pages_on_the_host(tiered: EngineThread) -> None:
    mark(tiered)
    assert ask(tiered, "a", ALICE, ALICES) == len(ALICES)
    assert ask(tiered, "b", BOB, BOBS) == len(BOBS) - 2 * PAGE
    demote(tiered, "a", "b")
    assert host_pages(tiered) == 2 + 2, "the prefix once there, too"
    forget_device(tiered)
    assert ask(tiered, "c", CAROL, BOBS) == len(BOBS) - 2 * PAGE
    tiered.send(messages.Resume("a"), messages.Resume("b"))
    text = [*ALICES, *reference.greedy(FOLDER, ALICES, NEW), 5]
    assert go_on(tiered, "a", text, [5]) == 2
    text = [*BOBS, *reference.greedy(FOLDER, BOBS, NEW), 5]
    assert go_on(tiered, "b", text, [5]) == 2


def test_host_pages_from_before_the_mark_are_found_only_by_their_tenant(tiered: EngineThread) -> None:
    assert ask(tiered, "a", ALICE, ALICES) == len(ALICES)
    demote(tiered, "a")
    forget_device(tiered)
    mark(tiered)
    assert ask(tiered, "b", BOB, BOBS) == len(BOBS)
    (use,) = [use for use in tiered.report().sessions if use.session == "a"]
    assert (use.state, use.host_pages) == ("paused", 3)
    tiered.send(messages.Resume("a"))
    text = [*ALICES, *reference.greedy(FOLDER, ALICES, NEW), 5]
    assert go_on(tiered, "a", text, [5]) == 2, "from the host"
