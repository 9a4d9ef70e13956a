"""Sessions that compete for rows and pages: they do not evict each other in turns, and each tenant pays for its own
rows."""

from __future__ import annotations

import math

import pytest

from djinn_client.protocol import CLASSES
from djinnd.core.batch import Batch
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tenancy import Tenancy
from djinnd.kvcache.tier import Tier, limit_tenant
from djinnd.scheduler.policy import Policy
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.tuning import STEP
from djinnd.scheduler.why import QUOTA, ROOM
from tests.support.copies import copies
from tests.support.departures import all_leave
from tests.support.overwritten import overwrite_free_pages
from tests.support.virtual import VirtualDevice, rising

PAGE = 4  # tokens
MINE, THEIRS = 1000, 1001
SLOW = rising(0.1, 0.01)


def copy_all(scheduler: Scheduler, model: str) -> None:
    """All copies that are under way in the model's tiers are made now."""
    for over in copies(scheduler.queues[model].residency.paging.moves):
        scheduler.queues[model].over(over)


# --- pages that no tier keeps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenants", [(1, 2), (1, 1)])
def test_a_prompt_is_read_to_its_end_although_another_needs_its_pages(tenants: tuple[int, int]) -> None:
    """Each prompt takes more than twice the ageing time, and the pool has room for one."""
    device = VirtualDevice(pages=150, max_tokens=64, seconds=SLOW)
    first, second = (device.open(f"s{n}", tenant=tenant, prompt=1984, max_tokens=1) for n, tenant in enumerate(tenants))
    device.run(2.5 * 31 * SLOW(64))
    assert first.request is None and second.request is None


def test_a_prompt_is_interrupted_for_a_higher_class() -> None:
    device = VirtualDevice(pages=150, max_tokens=64, seconds=SLOW)
    batch = device.open("batch", "batch", prompt=1984, max_tokens=2)
    device.run(5.0)
    device.open("interactive", "interactive", prompt=1984, max_tokens=2)
    device.step()
    assert device.batches[-1][0][0] == "interactive" and batch.computed == 0


def test_a_prompt_that_ageing_has_put_first_is_read_to_its_end() -> None:
    """The prompt takes more rows than ageing gives a session."""
    device = VirtualDevice(pages=150, max_tokens=64, seconds=rising(0.1, 0.001))
    endless = device.open("interactive", "interactive", prompt=1984, max_tokens=300)
    device.step()
    batch = device.open("batch", "batch", prompt=1984, max_tokens=1)
    device.run(30.0)
    assert batch.request is None and endless.request is not None


def test_two_sessions_with_deadlines_do_not_take_each_other_s_pages_row_by_row() -> None:
    device = VirtualDevice(pages=80, max_tokens=256)
    for name, deadline in (("a", 3.0), ("b", 3.05)):
        device.open(name, prompt=1000, max_tokens=50, deadline=deadline)
    device.run(60.0)
    assert device.rows["a"] + device.rows["b"] < 2 * (4 + 50) + 8


def test_no_room_is_kept_for_a_decoding_session_without_pages() -> None:
    """The time of the decoding row alone has to be measured, so no prompt may join it. But a session that reads a
    prompt holds the page that it needs."""
    scheduler = Scheduler(max_batch_tokens=32, max_rows=16)
    scheduler.add_model("m", KvManager(17, PAGE, 1, max_context=64), 64, 2)
    for _ in range(2):  # the time of chunks is known
        scheduler.queues["m"].batch_builder.times.note(1, 16, 0.01)
    decodes = ask(scheduler, "decodes", "m", PAGE, 1, max_tokens=9)
    run(scheduler)
    scheduler.hold(1)
    reads = ask(scheduler, "reads", "m", 15 * PAGE, 2)
    run(scheduler)
    scheduler.release(1)  # joins the line last
    batch = run(scheduler)
    assert batch is not None and [row.session for row in batch.rows] == [reads]
    while run(scheduler):
        pass
    assert reads.request is None and decodes.request is None


def test_no_room_is_kept_for_a_session_whose_tenant_s_quota_is_held_by_a_prompt() -> None:
    scheduler = Scheduler(max_batch_tokens=PAGE, max_rows=16, policy=Policy(ageing=1.0))
    scheduler.add_model("m", KvManager(17, PAGE, 1, max_context=64), 64, 2)
    for _ in range(2):
        scheduler.queues["m"].batch_builder.times.note(1, 16, 0.01)
    scheduler.set_tenant(MINE, 1.0, 3)
    old = ask(scheduler, "old", "m", 2 * PAGE, 1)
    scheduler.set_class("old", "batch")
    reads = ask(scheduler, "reads", "m", 3 * PAGE - 1, 2)
    run(scheduler)
    brief = ask(scheduler, "brief", "m", 1, 3)
    scheduler.tick(2.0)  # now `old` comes first
    batch = run(scheduler)
    assert batch is not None and [row.session for row in batch.rows] == [reads] and old.passed_over == QUOTA
    while run(scheduler):
        pass
    assert [session.request for session in (old, reads, brief)] == [None] * 3


# --- long prompts and little more to read ---------------------------------------------------------------------------


def test_a_session_with_little_to_read_does_not_wait_for_long_prompts() -> None:
    """A session decodes, so chunks are small. The first prompt gets the rest of each step, and the next one waits for
    it."""
    device = VirtualDevice(seconds=rising(0.01, 0.0005))
    back = device.open("back", prompt=500, max_tokens=1)
    device.run(10.0)
    assert back.request is None
    device.open("decodes")
    device.step()
    for name in ("first", "second"):
        device.open(name, prompt=4000, max_tokens=1)
    device.step()
    device.ask(back, prompt=6, max_tokens=1)
    device.step()
    assert back.request is None and ("back", 7) in device.batches[-1]  # six, and the token that it generated last


def test_a_session_back_from_the_host_does_not_wait_for_long_prompts() -> None:
    """Its KV does not count as tokens to read."""
    scheduler = Scheduler(max_batch_tokens=64, max_rows=16)
    scheduler.add_model("m", KvManager(513, PAGE, 1, max_context=2048), 2048, 2)
    scheduler.queues["m"].residency.paging.use_host(tier(64, Tenancy()))
    back = ask(scheduler, "back", "m", 50 * PAGE, 1)
    while run(scheduler):
        pass
    scheduler.wait("back")
    all_leave(scheduler)
    copy_all(scheduler, "m")
    overwrite_free_pages(scheduler.queues["m"].residency.kv)
    for number in (2, 3):
        ask(scheduler, f"long{number}", "m", 100 * PAGE, number)
    run(scheduler)
    first = len(back.tokens)
    scheduler.submit("back", Request(4, first, first + 6, 1), [7] * 6)
    run(scheduler)
    assert scheduler.queues["m"].residency.is_arriving(back)
    copy_all(scheduler, "m")
    batch = run(scheduler)
    assert batch is not None and batch.rows[0].session is back


def test_a_short_prompt_does_not_wait_and_long_ones_are_read_in_order_of_arrival() -> None:
    device = VirtualDevice(max_tokens=64)
    for name, prompt in (("long", 1000), ("longer", 2000), ("not so long", 200), ("short", 20)):
        device.open(name, prompt=prompt, max_tokens=1)
    device.step()
    assert device.batches[-1] == [("short", 20), ("long", 44)]
    device.step()
    assert device.batches[-1] == [("long", 64)]


def test_a_session_that_decodes_has_its_row_behind_any_number_of_prompts() -> None:
    """Once the first prompt finds no room, the class is closed, and no session behind the decoding one is
    considered."""
    device = VirtualDevice(seconds=rising(0.05, 0.0005))
    last = device.open("last")
    request = last.request
    assert request is not None
    device.step()
    device.scheduler.hold(request.id)
    prompts = [device.open(f"p{number}", prompt=100, max_tokens=1) for number in range(20)]
    device.release(request)
    behind = [device.open(f"behind{number}", prompt=100, max_tokens=1) for number in range(3)]
    device.step()
    assert sorted(name for name, _ in device.batches[-1]) == ["last", "p0"]
    assert {session.passed_over for session in prompts[1:]} == {ROOM}
    assert [session.passed_over for session in behind] == [ROOM, "", ""]


# --- several models -------------------------------------------------------------------------------------------------


def two_models(**tiers: Tier) -> Scheduler:
    scheduler = Scheduler(max_batch_tokens=64, max_rows=16)
    for name in "mn":
        kv = KvManager(17, PAGE, 1, max_context=64)
        paging = Paging(kv)
        if f"{name}_host" in tiers:
            paging.use_host(tiers[f"{name}_host"])
        if f"{name}_disk" in tiers:
            paging.use_disk(tiers[f"{name}_disk"])
        scheduler.add_model(name, kv, 64, 2, paging)
    return scheduler


def ask(scheduler: Scheduler, name: str, model: str, prompt: int, number: int, max_tokens: int = 1) -> Session:
    if name not in {session.id for session in scheduler.sessions()}:
        scheduler.open(Session(name, model, MINE, "agent"))
    session = scheduler.session(name)
    first = len(session.tokens)
    scheduler.submit(name, Request(number, first, first + prompt, max_tokens), [number] * prompt)
    return session


def run(scheduler: Scheduler) -> Batch | None:
    batch = scheduler.next_batch()
    if batch is not None:
        scheduler.complete(batch, [5] * sum(row.samples for row in batch.rows), 0.01)
    return batch


def tier(slots: int, tenancy: Tenancy) -> Tier:
    return Tier(bytearray(Tier.table_bytes(slots)), slots, tenancy)


def test_a_session_waits_for_a_host_slot_that_another_model_s_pages_use() -> None:
    """A tenant at its host quota gets a slot when one of its pages, of whichever model, is evicted."""
    host, disk = Tenancy(), Tenancy()
    scheduler = two_models(m_host=tier(8, host), m_disk=tier(8, disk), n_host=tier(8, host))
    mine, other = ask(scheduler, "a", "m", 8, 1), ask(scheduler, "b", "n", 8, 2)
    while run(scheduler):
        pass
    for name, session in (("m", mine), ("n", other)):
        scheduler.wait(session.id)
        all_leave(scheduler)
        copy_all(scheduler, name)
    paging = scheduler.queues["m"].residency.paging
    keys = scheduler.queues["m"].residency.lower_tiers.keys(mine)
    paging.write_out(mine.id, keys)
    copy_all(scheduler, "m")
    paging.forget_on_host(keys)
    for name in "mn":  # no page can be found on the devices
        kv = scheduler.queues[name].residency.kv
        kv.resize(17)
        overwrite_free_pages(kv)
    limit_tenant(host, MINE, 2)
    scheduler.wake(other.id)  # uses the only two slots that the tenant may have
    ask(scheduler, "a", "m", 4, 3)
    assert scheduler.next_batch() is None
    copy_all(scheduler, "n")
    assert scheduler.next_batch() is None
    copy_all(scheduler, "m")
    assert run(scheduler) is not None


def test_a_session_that_cannot_run_yet_gives_its_model_no_precedence() -> None:
    scheduler = two_models(m_host=tier(16, Tenancy()))
    gone = ask(scheduler, "gone", "m", 8, 1)
    run(scheduler)
    scheduler.wait("gone")
    all_leave(scheduler)
    copy_all(scheduler, "m")
    kv = scheduler.queues["m"].residency.kv
    kv.resize(17)
    overwrite_free_pages(kv)
    for name, model, priority in (("low", "m", "batch"), ("high", "n", "agent")):
        ask(scheduler, name, model, 4, len(name), max_tokens=9)
        scheduler.set_class(name, priority)  # type: ignore[arg-type]
    scheduler.set_class("gone", "interactive")
    ask(scheduler, "gone", "m", 4, 9)
    batch = run(scheduler)  # begins to bring it back from the host
    assert batch and scheduler.queues["m"].residency.is_arriving(gone)
    batches = [run(scheduler) for _ in range(3)]
    assert {batch.model for batch in batches if batch} == {"n"}


# --- calls that may come at any moment --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [None, math.inf])
def test_for_some_seconds_after_a_call_with_a_target_lower_classes_take_short_steps(target: float | None) -> None:
    device = VirtualDevice(max_tokens=512, seconds=rising(0.01, 0.0001), policy=Policy(ageing=1e9))
    calls = device.open("calls", "interactive", max_tokens=2, between_tokens=target)
    device.run(0.02)
    assert calls.request is None
    device.open("reads", "batch", prompt=1500, max_tokens=1)
    short, long = (STEP.headroom * 0.04 - 0.0101) / 0.0001, 512
    (row,) = stepped(device).rows
    assert row.count == (long if target else pytest.approx(short, rel=0.02))
    device.idle(STEP.recent_s)
    (row,) = stepped(device).rows
    assert row.count == long


def test_a_prompt_whose_first_token_is_late_is_no_longer_behind_short_ones() -> None:
    device = VirtualDevice(max_rows=2, seconds=rising(0.1, 0.0), policy=Policy(ageing=1e9))
    device.open("decodes")
    device.open("long", prompt=2000, max_tokens=1)
    for number in range(20):
        device.open(f"short-{number}", prompt=8, max_tokens=1)
    device.run(0.35)
    assert not device.rows["long"]
    device.run(0.2)
    assert device.rows["long"]


def test_a_request_s_own_target_counts_instead_of_its_class_s() -> None:
    device = VirtualDevice(max_tokens=512, seconds=rising(0.01, 0.0001))
    device.open("decodes", "agent", between_tokens=0.03)
    device.open("reads", "agent", prompt=1500)
    batch = stepped(device)
    assert batch.tokens == pytest.approx((STEP.headroom * 0.03 - 0.01) / 0.0001, rel=0.05)


def stepped(device: VirtualDevice) -> Batch:
    batch = device.step()
    assert batch
    return batch


# --- charges ----------------------------------------------------------------------------------------------------------


def clocks(scheduler: Scheduler) -> float:
    return sum(scheduler.shares.clock(priority, tenant) for priority in CLASSES for tenant in (MINE, THEIRS))


def test_all_of_a_step_s_time_is_charged_even_if_it_was_unusually_slow() -> None:
    device = VirtualDevice()
    device.open("a", tenant=MINE, prompt=40), device.open("b", "batch", tenant=THEIRS)
    scheduler = device.scheduler
    for _ in range(3):
        before = clocks(scheduler)
        batch = scheduler.next_batch()
        assert batch
        scheduler.complete(batch, [5] * sum(row.samples for row in batch.rows), 3.0)
        assert clocks(scheduler) - before == pytest.approx(3.0)


def test_an_unmeasured_step_is_charged_with_the_next_measured_one_of_another_model() -> None:
    device = VirtualDevice("m", "n", max_tokens=100)
    device.open("prompt", tenant=MINE, prompt=150, model="m")
    scheduler = device.scheduler
    batch = scheduler.next_batch()
    assert batch and batch.tokens == 100
    scheduler.complete(batch, [], 0.0)
    device.open("decodes", "interactive", tenant=THEIRS, model="n")
    batch = scheduler.next_batch()
    assert batch and batch.model == "n"
    known = device.batch_builder("n").times.predict(1)
    scheduler.complete(batch, [5], 1.01)
    charged = [
        scheduler.shares.clock(priority, tenant) for priority, tenant in (("agent", MINE), ("interactive", THEIRS))
    ]
    assert charged == [pytest.approx(1.0), pytest.approx(0.01)]
    assert device.batch_builder("n").times.predict(1) == known


# --- why ------------------------------------------------------------------------------------------------------------


def test_an_evicted_session_is_said_to_wait_for_pages() -> None:
    scheduler = two_models(m_host=tier(16, Tenancy()))
    ask(scheduler, "low", "m", 40, 1, max_tokens=9)
    scheduler.set_class("low", "batch")
    run(scheduler)
    ask(scheduler, "high", "m", 40, 2, max_tokens=9)
    run(scheduler)
    assert scheduler.queues["m"].residency.is_leaving(scheduler.session("low"))
    assert "more pages" in scheduler.why("low").reason
