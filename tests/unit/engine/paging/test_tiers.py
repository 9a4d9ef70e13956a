"""The lower tiers of a model: how they are set up, how signals use them, and what the next engine finds there."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djinn_client.protocol import Class
from djinnd import messages
from djinnd.core.batch import Batch, Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.engine.load.loading import PagesResult
from djinnd.engine.memory.host_pages import HostPages
from djinnd.engine.paging import checksums, page_copies
from djinnd.kvcache.checksum import checksum
from djinnd.scheduler import waits
from djinnd.scheduler.policy import Policy
from tests.support import reference
from tests.support.besides import add_part, in_steps, on_message
from tests.support.engine_thread import FOREVER
from tests.support.late_copies import LateDevice
from tests.support.overwritten import overwrite_free_pages
from tests.support.pinned import pinned
from tests.support.tiered import FOLDER, NEW, PROMPT, TIER, Tiered, expected, tiered


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Tiered]:
    with tiered(tmp_path) as engine:
        yield engine


# --- tiers ------------------------------------------------------------------------------------------------------------


def test_a_model_has_the_configured_tiers(engine: Tiered) -> None:
    (info,) = engine.report().models
    assert info.host_pages * info.page_bytes <= TIER < (info.host_pages + 2) * info.page_bytes
    assert info.disk_pages * info.page_bytes == TIER
    assert (info.host_pages_used, info.disk_pages_used) == (0, 0)


def test_a_note_says_how_much_host_memory_is_pinned(engine: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pinned(engine.transfers().host)
    (info,) = engine.report().models
    assert info.host_pages_pinned == info.host_pages and not any("pinned" in note for note in info.notes)
    monkeypatch.setattr(pages, "pinned", info.host_pages - 1)
    (info,) = engine.report().models
    assert any(f"{info.host_pages - 1:,} of {info.host_pages:,} are pinned" in note for note in info.notes)


def test_only_a_pause_waits_for_host_memory_to_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has room for one of two sessions, and they alternate."""
    is_pinned, take, is_ready = threading.Event(), HostPages.take_ready, HostPages.is_ready
    monkeypatch.setattr(HostPages, "take_ready", lambda pages: take(pages) if is_pinned.is_set() else iter(()))
    monkeypatch.setattr(HostPages, "is_ready", lambda pages, slot: is_pinned.is_set() and is_ready(pages, slot))
    with Tiered(max_batch_tokens=256) as engine:
        page_bytes = engine.loaded(FOLDER, "other", host_kv_bytes=0).page_bytes
        engine.loaded(FOLDER, host_kv_bytes=TIER, kv_bytes=4 * page_bytes)
        engine.send(engine.grant(engine.until(messages.NeedArena)))
        for session in "ab":
            engine.open(session)
            assert engine.ran(session) == expected()
        assert (engine.use("a").pages, engine.use("a").host_pages) == (0, 0)
        asked = engine.pause("b")
        engine.send(asked)
        assert engine.use("b").pages == 3
        is_pinned.set()
        assert engine.until(messages.Paused).pages == 3


def test_pages_for_an_unloaded_model_are_released() -> None:
    with Tiered() as engine:
        engine.loaded(FOLDER, host_kv_bytes=TIER)
        need = engine.until(messages.NeedArena)
        engine.send(messages.Unload(77, "m"))
        engine.until(messages.Unloaded)
        engine.send(engine.grant(need))
        engine.loaded(FOLDER)  # queued after it
        engine.report()


def test_pages_of_an_earlier_load_do_not_change_a_later_load_of_that_name(engine: Tiered) -> None:
    paging = engine.scheduler.queues["m"].residency.paging
    paging.is_expected = True  # of the load that serves
    engine.engine._loads._pages.put(PagesResult(77, "m", None, "that one had no room"))
    (info,) = engine.report().models
    while not engine.engine._loads._pages.empty():
        (info,) = engine.report().models
    assert engine.report().models[0].notes == info.notes and not any("that one" in note for note in info.notes)
    assert paging.is_expected
    paging.is_expected = False


def test_an_arena_without_room_is_a_note_and_sessions_run() -> None:
    with Tiered() as engine:
        engine.loaded(FOLDER, host_kv_bytes=TIER)
        need = engine.until(messages.NeedArena)
        engine.send(messages.ArenaRefused(need.request, "/dev/shm is full", {}))
        while not any("/dev/shm is full" in note for note in engine.report().models[0].notes):
            pass
        engine.open("s")
        assert engine.ran("s") == expected()
        assert "/dev/shm is full" in engine.refused("s").message


# --- in halves --------------------------------------------------------------------------------------------------------


def test_a_step_begins_when_the_first_halves_of_its_pages_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second halves are waited for by the blocks that read them, and not earlier."""
    monkeypatch.setattr(page_copies, "HALF_BYTES", 1)
    device, begun = LateDevice(), list[tuple[int, int]]()
    with Tiered(device, max_batch_tokens=256) as engine:
        engine.load_with_tiers()
        engine.open("s")
        told = engine.ran("s")
        engine.send(messages.Signal("s", waits=True))
        assert engine.use_when("s", "waiting", on_device=False).host_pages == 3
        runner = engine.runner()
        overwrite_free_pages(runner.kv)
        runner.model.pool[1:] = 0x3C  # not large as numbers of any dtype, whichever data is there meanwhile
        begin = runner.model.placement.begin

        def noted(index: int) -> None:
            begin(index)
            begun.append((index, device.ordered))

        monkeypatch.setattr(runner.model.placement, "begin", noted)
        tokens, reply = engine.outcome(engine.run("s", [5], NEW))
        assert isinstance(reply, messages.Finished)
        assert begun[:4] == [(0, 0), (1, 0), (2, 1), (3, 1)]
        assert (device.copies["promote first half"], device.copies["promote second half"]) == (3, 3)
        assert tokens == reference.greedy(FOLDER, [*PROMPT, *told, 5], NEW)


# --- signals ----------------------------------------------------------------------------------------------------------


def test_a_waiting_session_leaves_and_comes_back_at_its_client_s_signal(engine: Tiered) -> None:
    engine.ran("s")
    engine.send(messages.Signal("s", waits=True))
    assert engine.use_when("s", "waiting", on_device=False).host_pages == 3
    engine.send(messages.Signal("s", waits=False))
    assert engine.use_when("s", "idle", on_device=True).pages == 3


def test_all_pages_of_a_partly_arrived_session_are_reported(engine: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device still has its full pages. The last page cannot be fetched while its checksum is being computed."""
    may_sum = threading.Event()
    monkeypatch.setattr(checksums, "checksum", lambda page: checksum(page) if may_sum.wait(FOREVER) else 0)
    engine.ran("s")
    engine.send(messages.Signal("s", waits=True))
    assert engine.use_when("s", "waiting", on_device=False).host_pages == 3
    engine.send(messages.Signal("s", waits=False))
    use = engine.use("s")
    assert (use.state, use.pages, use.host_pages) == ("idle", 2, 1)
    may_sum.set()
    assert engine.use_when("s", "idle", on_device=True).pages == 3


def test_a_waiting_session_comes_back_a_moment_before_it_is_expected(engine: Tiered) -> None:
    engine.ran("s")
    engine.send(messages.Signal("s", waits=True, expected_s=0.3))
    engine.use_when("s", "waiting", on_device=False)
    assert engine.use_when("s", "idle", on_device=True).pages == 3


def test_a_wait_too_short_to_be_worth_an_eviction_does_nothing(engine: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "WORTH", 1e9)
    engine.ran("s")
    engine.send(messages.Signal("s", waits=True, expected_s=1.0))
    use = engine.use("s")
    assert (use.state, use.pages) == ("idle", 3)


def test_a_session_that_has_left_is_expected_after_a_short_wait(
    engine: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.ran("s")
    engine.send(messages.Signal("s", waits=True))
    engine.use_when("s", "waiting", on_device=False)
    monkeypatch.setattr(waits, "WORTH", 1e9)
    engine.send(messages.Signal("s", waits=True, expected_s=0.01))
    assert engine.use_when("s", "idle", on_device=True).pages == 3


def test_a_session_that_has_left_is_fetched_earlier_by_its_copying_time(engine: Tiered) -> None:
    engine.ran("s")
    engine.send(messages.Signal("s", waits=True))
    engine.use_when("s", "waiting", on_device=False)
    residency = engine.scheduler.queues["m"].residency
    residency.lower_tiers.costs.bus = 3 * residency.kv.page_bytes / 600  # copying takes ten minutes
    engine.send(messages.Signal("s", waits=True, expected_s=1800.0))
    engine.report()
    early = time.monotonic() + 1800 - engine.scheduler.session("s").wakes_at
    assert early > waits.LEAD * 600


def learned(engine: Tiered, session: str, *seconds: float, tool: str = "search") -> None:
    """Teaches the engine how long the session's tenant waits for the tool."""
    tenant = engine.scheduler.session(session).tenant
    for each in seconds:
        engine.waits.begin("earlier", tenant, tool, 0.0)
        engine.waits.end("earlier", each)


def test_a_session_waiting_for_a_known_tool_is_back_at_its_usual_time(engine: Tiered) -> None:
    engine.ran("s")
    learned(engine, "s", 0.3, 0.3, 0.3)
    engine.send(messages.Signal("s", waits=True, tool="search"))
    engine.use_when("s", "waiting", on_device=False)
    assert engine.use_when("s", "idle", on_device=True).pages == 3


def test_a_session_that_left_early_is_expected_once_others_have_shown_the_tool_s_time(engine: Tiered) -> None:
    engine.ran("s")
    engine.send(messages.Signal("s", waits=True, tool="search"))
    engine.use_when("s", "waiting", on_device=False)
    session = engine.scheduler.session("s")
    left = engine.scheduler.queues["m"].residency.lower_tiers.left
    assert left.get("s").back_at == 0.0
    learned(engine, "s", 3000.0, 3000.0)
    engine.open("another")
    engine.report()
    engine.waits.begin("another", session.tenant, "search", time.monotonic() - 3000.0)
    engine.send(messages.Signal("another", waits=False))
    engine.report()
    assert 2000.0 < left.get("s").back_at - time.monotonic() <= 3000.0
    assert session.wakes_at == 0.0, "and is not fetched before it asks"
    engine.send(messages.Signal("s", waits=False))
    assert engine.use_when("s", "idle", on_device=True).pages == 3


def test_a_client_s_expectation_overrides_the_learned_time(engine: Tiered) -> None:
    engine.ran("s")
    learned(engine, "s", 3000.0, 3000.0, 3000.0)
    engine.send(messages.Signal("s", waits=True, tool="search"))
    engine.report()
    session = engine.scheduler.session("s")
    assert 2000.0 < session.wakes_at - time.monotonic() <= 3000.0
    engine.send(messages.Signal("s", waits=True, expected_s=500.0, tool="search"))
    engine.report()
    assert 300.0 < session.wakes_at - time.monotonic() <= 500.0
    engine.send(messages.Signal("s", waits=True, tool="read"))
    engine.report()
    assert (session.waits, session.wakes_at) == (True, 0.0), "nobody knows how long that takes"


def test_a_known_wait_too_short_to_be_worth_an_eviction_does_nothing(
    engine: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "WORTH", 1e9)
    engine.ran("s")
    learned(engine, "s", 1.0, 1.0, 1.0, tool="")
    engine.send(messages.Signal("s", waits=True))
    use = engine.use("s")
    assert (use.state, use.pages) == ("idle", 3)


def test_waits_are_measured_from_signal_to_signal_and_from_signal_to_call(engine: Tiered) -> None:
    tools = engine.waits._tools
    engine.ran("s")
    for seen in range(1, 3):
        engine.send(messages.Signal("s", waits=True, tool="search"), messages.Signal("s", waits=False))
        engine.report()
        assert {tool: each.seen for (_, tool), each in tools.items()} == {"search": seen}
    engine.send(messages.Signal("s", waits=True, tool="read"))
    engine.ran("s", [5])
    assert {tool: each.seen for (_, tool), each in tools.items()} == {"search": 2, "read": 1}
    engine.ran("s", [5])
    engine.send(messages.Signal("s", waits=False))
    engine.report()
    assert {tool: each.seen for (_, tool), each in tools.items()} == {"search": 2, "read": 1}


def test_closing_a_session_ends_no_wait(engine: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "KNOWN_AFTER", 1)
    engine.open("t")
    engine.send(messages.Signal("t", waits=True, tool="search"), messages.Close("t"), messages.Signal("t", waits=False))
    engine.report()
    assert engine.waits.expected(0, "search") is None


def test_signals_of_an_unknown_session_do_nothing(engine: Tiered) -> None:
    signals = [messages.Signal("ghost", waits=waits) for waits in (True, False)]
    engine.send(*signals, messages.Signal("ghost", waits=True, expected_s=1.0))
    assert engine.ran("s") == expected()


def test_a_call_ends_the_wait_of_its_session(engine: Tiered) -> None:
    tokens = engine.ran("s")
    run = engine.run_message("s", [5], NEW)
    engine.send(messages.Signal("s", waits=True), run)
    assert engine.outcome(run.request)[0] == expected([*PROMPT, *tokens, 5])


# --- during steps -----------------------------------------------------------------------------------------------------


def test_copies_that_no_call_waits_for_get_a_share_of_the_bus_beside_decode_steps(engine: Tiered) -> None:
    def batch(*counts: int, priority: Class = "interactive") -> Batch:
        session = Session("s", "m", 0, priority)
        rows = (Row(session, Request(1, 0, 1, 8), 0, count, 0, 4, False) for count in counts)
        return Batch("m", tuple(rows), 1)

    rate, bus = engine.engine._tiers._rate_during_step, engine.device.rates().bus
    assert rate(batch(64)) == rate(batch(1, priority="batch")) == math.inf
    assert rate(batch(1, 64)) == Policy().paging * bus < bus
    assert rate(batch(64)) == Policy().paging * bus, "where two models take turns, it is kept between two steps"
    targets: dict[Class, tuple[float, float]] = {"interactive": (0.04, 0.4), "agent": (0.08, 0.4), "batch": (0.0, 0.0)}
    for paging, expected_rate in ((0.5, 0.5 * bus), (1.0, math.inf)):
        engine.send(messages.SetPolicy(targets, 10.0, paging))
        engine.report()
        assert rate(batch(1)) == expected_rate


def test_a_waiting_session_leaves_during_a_step_or_between_two(engine: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, seen = engine.scheduler, list[tuple[str, bool]]()
    is_beside, depart = in_steps(monkeypatch, engine.engine), scheduler.depart

    def departed() -> bool:
        seen.extend((session, is_beside()) for session in scheduler.queues["m"].residency.to_leave)
        return depart()

    monkeypatch.setattr(scheduler, "depart", departed)
    engine.open("t")
    engine.ran("s")
    engine.ran("t")
    wait = messages.Signal("s", waits=True)
    run = engine.run_message("t", [5], NEW)
    engine.send(run, wait)  # received together
    engine.outcome(run.request)
    engine.use_when("s", "waiting", on_device=False)
    engine.send(messages.Signal("t", waits=True))
    engine.use_when("t", "waiting", on_device=False)
    assert seen == [("s", True), ("t", False)]


def test_idle_sessions_are_paused_and_resumed_during_a_step_and_running_ones_after_it(
    engine: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.open("t")
    engine.open("u")
    before = [*PROMPT, *engine.ran("s")]
    assert before == [*PROMPT, *engine.ran("t")] == [*PROMPT, *engine.ran("u")]
    engine.paused("u")
    is_beside, heard = in_steps(monkeypatch, engine.engine), list[tuple[str, str, bool]]()
    idle, running = engine.pause("t"), engine.pause("s")
    said = [messages.Resume("u"), idle, messages.Open("v", "m", 0, "agent", []), running, messages.Resume("t")]

    def recorded(message: Any) -> None:
        heard.append((type(message).__name__, getattr(message, "session", ""), is_beside()))

    def speaking() -> None:
        sent, said[:] = said[:], []
        engine.send(*sent)

    on_message(monkeypatch, engine.engine, recorded)
    add_part(monkeypatch, engine.engine, speaking)
    run = engine.run_message("s", [5], NEW)
    engine.send(run)
    tokens, told = list[int](), set[int]()
    while len(told) < 2:
        match message := engine.receive():
            case messages.Stepped():
                tokens += [token.token for token in message.tokens]
            case messages.Paused():
                told.add(message.request)
            case messages.Failed():
                assert (message.request, message.code) == (idle.request, "retry"), "it was resumed before it had paused"
                told.add(message.request)
    assert heard[:6] == [
        ("Run", "s", False),
        ("Resume", "u", True),
        ("Pause", "t", True),
        ("Open", "v", True),
        ("Pause", "s", False),
        ("Resume", "t", False),
    ]
    engine.send(messages.Resume("s"))
    tokens += engine.outcome(run.request)[0]
    assert tokens == expected([*before, 5])
    for session in "tu":
        assert engine.ran(session, [7]) == expected([*before, 7])


def test_work_that_no_call_waits_for_is_left_for_the_next_step(engine: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.open("t")
    engine.ran("t")
    scheduler, tend, seen = engine.scheduler, engine.scheduler.tend, list[tuple[str, bool]]()
    is_beside = in_steps(monkeypatch, engine.engine)

    def recorded(message: Any) -> None:
        seen.append((type(message).__name__, is_beside()))

    def tended(now: float) -> None:
        seen.append(("tend", is_beside()))
        tend(now)

    on_message(monkeypatch, engine.engine, recorded)
    monkeypatch.setattr(scheduler, "tend", tended)
    run = engine.run_message("s", PROMPT, 1000)
    engine.send(run)
    engine.until(messages.Stepped)
    seen.clear()
    for _ in range(3):
        pause = engine.pause("t")
        engine.send(pause)
        assert engine.until(messages.Paused, messages.Stepped).request == pause.request
        # if the messages come between two steps, the last one is left for the next
        engine.send(messages.Inquire(7), messages.Resume("t"))
        engine.until(messages.Report, messages.Stepped)
    while ("tend", True) not in seen:
        engine.until(messages.Stepped)
    engine.send(messages.CancelRun(run.request))
    engine.outcome(run.request)
    heard = [name for name, beside in seen if beside]
    assert heard.count("Pause") == heard.count("Resume") == 3
    assert {name for name, beside in seen if not beside} <= {"CancelRun", "Inquire"}
    pause = engine.pause("t")  # without a step, it is handled at once
    engine.send(pause)
    assert engine.until(messages.Paused).request == pause.request
    assert ("Pause", False) in seen


def test_sessions_leave_one_after_another_without_messages_or_copies(
    engine: Tiered, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.open("t")
    for session in "st":
        engine.ran(session)
    waits = [messages.Signal(session, waits=True) for session in "st"]
    engine.send(*waits)
    for session in "st":
        engine.use_when(session, "waiting", on_device=False)
    for session in "st":
        engine.send(messages.Signal(session, waits=False))
        engine.use_when(session, "idle", on_device=True)
    scheduler, channel = engine.scheduler, engine.channel
    depart, receive, seen = scheduler.depart, channel.receive, list[tuple[int, float]]()
    to_leave = scheduler.queues["m"].residency.to_leave
    left = 0

    def departed() -> bool:
        nonlocal left
        before = len(to_leave)
        answer = depart()
        left += before - len(to_leave)
        return answer

    def received(timeout: float) -> list[Any]:
        seen.append((left, timeout))
        return receive(timeout)

    monkeypatch.setattr(scheduler, "depart", departed)
    monkeypatch.setattr(channel, "receive", received)
    engine.send(*waits)  # the host still has their pages
    for session in "st":
        engine.use_when(session, "waiting", on_device=False)
    assert [timeout for gone, timeout in seen if gone == 1] == [0.0]


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_the_report_has_each_tenant_s_bytes_in_each_tier(engine: Tiered) -> None:
    engine.open("t", tenant=7)
    assert engine.ran("s") == engine.ran("t") == expected()
    (info,) = engine.report().models
    three = 3 * info.page_bytes
    assert engine.report().tenants == [messages.TenantUse(0, three, 0, 0), messages.TenantUse(7, three, 0, 0)]
    engine.paused("s", "disk")
    assert engine.report().tenants == [messages.TenantUse(0, 0, 0, three), messages.TenantUse(7, three, 0, 0)]


def test_a_tenant_keeps_its_host_quota_and_recomputes_the_rest(engine: Tiered) -> None:
    (info,) = engine.report().models
    engine.send(messages.SetTenants([messages.TenantLimits(0, host_kv=2 * info.page_bytes)]))
    tokens = engine.ran("s")
    assert engine.paused("s").pages == 2
    (use,) = engine.report().tenants
    assert (use.device_kv, use.host_kv) == (0, 2 * info.page_bytes)
    engine.open("t", tenant=7)
    engine.ran("t")
    assert engine.paused("t").pages == 3
    engine.send(messages.Resume("s"))
    assert engine.ran("s", [5]) == expected([*PROMPT, *tokens, 5])
    engine.send(messages.SetTenants([messages.TenantLimits(0, host_kv=0)]))
    assert [use.tenant for use in engine.report().tenants if use.host_kv] == [7]


# --- the next engine --------------------------------------------------------------------------------------------------


def test_two_models_of_one_checkpoint_have_disk_pages_of_their_own_which_the_next_engine_finds(tmp_path: Path) -> None:
    sessions = {"m": "s", "n": "t"}  # by model
    spoken: dict[str, list[int]] = {}
    with Tiered(max_batch_tokens=256) as first:
        for model, session in sessions.items():
            first.load_with_tiers(tmp_path, name=model, kv_bytes=TIER)
            first.open(session, model)
            spoken[session] = [*PROMPT, *first.ran(session)]
        for session in sessions.values():
            assert first.paused(session, "disk").pages == 3
        assert [info.disk_pages_used for info in first.report().models] == [3, 3]
        first.send(messages.Shutdown(keep_pages=True))
        first.join()
    with Tiered(max_batch_tokens=256) as second:
        for model, session in reversed(sessions.items()):
            second.load_with_tiers(tmp_path, name=model, kv_bytes=TIER)
            second.open(session, model, tokens=spoken[session])
            run = second.run_message(session, [5], NEW)
            second.send(run)
            more, reply = second.outcome(run.request)
            assert isinstance(reply, messages.Finished) and more == expected([*spoken[session], 5])
            assert reply.computed <= 2, "its pages were there"


def test_kept_pages_are_found_by_the_next_engine() -> None:
    with Tiered(max_batch_tokens=256) as first:
        first.load_with_tiers()
        first.open("s")
        tokens = first.ran("s")
        first.send(messages.Shutdown(keep_pages=True))
        first.join()
        pages = first.arenas[-1]
        with Tiered(max_batch_tokens=256) as second:
            second.loaded(FOLDER, host_kv_bytes=TIER)
            need = second.until(messages.NeedArena)
            ready = messages.ArenaReady(need.request, pages.name, offset=4096, complete=True)
            second.send(ready)
            while not second.report().models[0].host_pages:
                pass
            assert second.report().models[0].host_pages_used == 3
            second.open("s", tokens=[*PROMPT, *tokens])
            run = second.run_message("s", [5], NEW)
            second.send(run)
            more, reply = second.outcome(run.request)
            assert isinstance(reply, messages.Finished) and more == expected([*PROMPT, *tokens, 5])
            assert reply.computed <= 2, "its pages were there"
