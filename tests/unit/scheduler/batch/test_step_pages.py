"""Evictions within a step, and how they affect the rest of the step."""

from __future__ import annotations

from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tier import Tier
from djinnd.scheduler.scheduler import Scheduler
from tests.support.copies import copies
from tests.support.departures import all_leave
from tests.support.overwritten import overwrite_free_pages

PAGE = 4  # tokens, as many as a step takes
PROMPT = list(range(3 * PAGE))


class Harness:
    """A scheduler with five pages on the device, and more on the host."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(max_batch_tokens=PAGE, max_rows=4)
        self.kv = KvManager(6, PAGE, 1, max_context=64)
        self.paging = Paging(self.kv)
        self.paging.use_host(Tier(bytearray(Tier.table_bytes(16)), 16))
        self.scheduler.add_model("m", self.kv, 64, 2, self.paging)
        self.requests = 0

    def ask(self, session: Session, prompt: list[int], max_tokens: int = 1) -> Session:
        self.requests += 1
        self.scheduler.open(session)
        self.scheduler.submit(session.id, Request(self.requests, 0, len(prompt), max_tokens), prompt)
        return session

    def go_on(self, session: Session) -> None:
        self.requests += 1
        first = len(session.tokens)
        self.scheduler.submit(session.id, Request(self.requests, first, first, 1), [])

    def step(self) -> list[Session]:
        """Runs a step. Returns the sessions that have a row."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return []
        self.scheduler.complete(batch, [99] * sum(row.samples for row in batch.rows))
        return [row.session for row in batch.rows]

    def copy_all(self, failing: int = 0) -> None:
        """Makes all copies. The first `failing` of them fail."""
        for over in copies(self.paging.moves, failing=failing):
            self.scheduler.queues["m"].over(over)


def test_a_session_that_is_evicted_is_not_considered_in_the_same_step() -> None:
    """A page without KV is free at once, so the other session has its row; the page with KV is being copied. The host
    has what follows, and there is room for that."""
    harness = Harness()
    victim = harness.ask(Session("victim", "m", 1, "batch"), PROMPT)
    harness.step()
    twin = harness.ask(Session("twin", "m", 1, "agent"), PROMPT[: 2 * PAGE])
    while twin.request is not None:
        harness.step()
    harness.scheduler.wait("twin")
    all_leave(harness.scheduler)
    harness.copy_all(failing=1)
    overwrite_free_pages(harness.kv)  # so only the host has the second page, and only the victim has the first
    first = harness.ask(Session("first", "m", 2, "agent"), [77] * 2 * PAGE, max_tokens=9)
    while len(first.tokens) == 2 * PAGE:
        harness.step()
    assert harness.step() == [first]
    residency = harness.scheduler.queues["m"].residency
    assert residency.is_leaving(victim) and not residency.is_arriving(victim)
    harness.scheduler.check_integrity()
    for _ in range(20):
        harness.copy_all()
        harness.step()
    assert first.request is None and victim.request is None


def away(harness: Harness, *names: str, pages: int = 2) -> list[Session]:
    """Sessions with `pages` pages each, on the host only."""
    sessions = []
    for number, name in enumerate(names):
        session = harness.ask(Session(name, "m", 1, "agent"), [pages * 10 + number] * pages * PAGE)
        while session.request is not None:
            harness.step()
        harness.scheduler.wait(name)
        all_leave(harness.scheduler)
        harness.copy_all()
        sessions.append(session)
    overwrite_free_pages(harness.kv)
    assert not any(harness.kv.pages_held(name) for name in names)
    return sessions


def test_room_is_made_for_the_next_returning_session_along_with_the_first() -> None:
    harness = Harness()
    sessions = away(harness, "a", "b", "c")
    idle = [harness.ask(Session(name, "m", 1, "agent"), [50 + len(name)] * 2 * PAGE) for name in ("d", "ee")]
    while any(session.request for session in idle):
        harness.step()
    for session in sessions:
        harness.go_on(session)
    assert harness.step() == []
    residency = harness.scheduler.queues["m"].residency
    assert all(map(residency.is_leaving, idle))
    harness.copy_all()
    assert harness.step() == []
    assert [residency.is_arriving(session) for session in sessions] == [True, True, False]
    while any(session.request for session in sessions):
        harness.copy_all()
        harness.step()


def test_the_next_returning_session_gets_no_pages_that_are_free_for_the_first() -> None:
    harness = Harness()
    (large,), (small,) = away(harness, "large", pages=4), away(harness, "small", pages=1)
    idle = harness.ask(Session("idle", "m", 1, "agent"), [99] * 3 * PAGE)
    while idle.request is not None:
        harness.step()
    harness.go_on(large), harness.go_on(small)
    residency = harness.scheduler.queues["m"].residency
    assert harness.step() == [] and residency.is_leaving(idle) and not residency.is_arriving(small)
    harness.copy_all()
    harness.step()
    assert residency.is_arriving(large)


def test_a_session_comes_back_by_copy_although_the_step_has_no_room_to_recompute_it() -> None:
    """The time of a step with only decoding rows has to be measured, so no other row may join it."""
    harness = Harness()
    for _ in range(2):  # the time of chunks is known
        harness.scheduler.queues["m"].batch_builder.times.note(1, 3, 0.01)
    (back,) = away(harness, "back")
    decodes = harness.ask(Session("decodes", "m", 1, "agent"), [60], max_tokens=6)
    harness.step()
    harness.go_on(back)
    assert harness.step() == [decodes]
    assert harness.scheduler.queues["m"].residency.is_arriving(back)


def test_a_decoding_session_gets_its_next_page_from_the_last_in_line() -> None:
    """There are five pages, and each session grows to three."""
    harness = Harness()
    first, second = (
        harness.ask(Session(name, "m", 1, "agent"), PROMPT[:PAGE], max_tokens=2 * PAGE + 1) for name in "ab"
    )
    held = set()
    while first.request is not None:
        harness.step()
        harness.scheduler.check_integrity()
        held.add((harness.kv.pages_held("a"), harness.kv.pages_held("b")))
    assert (2, 2) in held and (3, 2) in held and max(held)[0] == 3 and second.request is not None
