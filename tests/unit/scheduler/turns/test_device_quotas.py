"""A tenant's pages on the device stay within its quota, at the cost of its own sessions only."""

from __future__ import annotations

from itertools import count

import pytest

from djinn_client.errors import QuotaExceeded
from djinnd.core.batch import Batch
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tier import Tier
from djinnd.scheduler.residency.kv_residency import KvResidency
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.turns.device_quotas import Claim, DeviceQuotas
from djinnd.scheduler.why import QUOTA
from tests.support.copies import copies
from tests.support.departures import all_leave
from tests.support.overwritten import overwrite_free_pages

PAGE = 4  # tokens
PAGE_BYTES = 1 << 20
MINE, THEIRS = 1000, 1001


class Harness:
    """A scheduler with several models. After every step it checks that no tenant exceeds its quota."""

    def __init__(self, *models: str, pages: int = 64) -> None:
        self.scheduler = Scheduler(max_batch_tokens=64, max_rows=16)
        self.kv = {name: KvManager(pages + 1, PAGE, PAGE_BYTES, max_context=64) for name in models or ("m",)}
        for name, kv in self.kv.items():
            self.scheduler.add_model(name, kv, 64, num_blocks=2)
        self.limits: dict[int, int] = {}
        self._ids = count(1)

    def limit(self, tenant: int, pages: int | None) -> None:
        self.limits.pop(tenant, None)
        if pages is not None:
            self.limits[tenant] = pages
        self.scheduler.set_tenant(tenant, 1.0, None if pages is None else pages * PAGE_BYTES)

    def held(self, tenant: int) -> int:
        return sum(kv.pool.used_by(tenant) for kv in self.kv.values())

    def submit(self, name: str, tokens: int, tenant: int = MINE, model: str = "m", max_tokens: int = 4) -> Request:
        if name not in {session.id for session in self.scheduler.sessions()}:
            self.scheduler.open(Session(name, model, tenant, "agent"))
        first, number = len(self.scheduler.session(name).tokens), next(self._ids)
        request = Request(number, first, first + tokens, max_tokens)
        self.scheduler.submit(name, request, [number % 10] * tokens)  # no two have the same prompt
        return request

    def step(self) -> list[str]:
        """Runs a step. Returns the sessions that had a row."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return []
        self._complete(batch)
        return [row.session.id for row in batch.rows]

    def _complete(self, batch: Batch) -> None:
        for tenant, pages in self.limits.items():
            assert self.held(tenant) <= pages
        self.scheduler.complete(batch, [5] * sum(row.samples for row in batch.rows))
        self.scheduler.check_integrity()

    def copy_all(self, model: str = "m") -> None:
        for over in copies(self.scheduler.queues[model].residency.paging.moves):
            self.scheduler.queues[model].over(over)

    def run(self, *requests: Request) -> None:
        for _ in range(200):
            if all(request.finish_reason for request in requests):
                return
            self.step()
        raise AssertionError([request.state for request in requests])


def test_sessions_within_the_quota_all_run_at_once() -> None:
    harness = Harness()
    harness.limit(MINE, 4)
    harness.submit("a", 5), harness.submit("b", 5)
    assert harness.step() == ["a", "b"]


def test_a_session_that_would_exceed_the_quota_waits_and_says_so() -> None:
    harness = Harness()
    harness.limit(MINE, 3)
    first, second = harness.submit("a", 5), harness.submit("b", 5)
    theirs = harness.submit("c", 40, THEIRS)
    assert harness.step() == ["a", "c"]
    assert "quota device_kv" in harness.scheduler.why("b").reason
    harness.run(first, second, theirs)


def test_only_idle_sessions_of_the_same_tenant_are_evicted() -> None:
    harness = Harness()
    harness.limit(MINE, 3)
    harness.run(harness.submit("mine", 8), harness.submit("theirs", 8, THEIRS))
    before = harness.kv["m"].pages_held("theirs")
    harness.run(harness.submit("next", 8))
    assert harness.kv["m"].pages_held("mine") == 0 and harness.kv["m"].pages_held("theirs") == before


def test_idle_sessions_of_other_models_are_evicted() -> None:
    harness = Harness("m", "n")
    harness.limit(MINE, 3)
    harness.run(harness.submit("there", 8, model="n"))
    harness.run(harness.submit("here", 8))
    assert harness.kv["n"].pages_held("there") == 0


def test_the_later_session_is_evicted_for_the_earlier_one() -> None:
    harness = Harness()
    harness.limit(MINE, 4)
    first, second = harness.submit("a", 6, max_tokens=10), harness.submit("b", 6, max_tokens=10)
    harness.run(first)
    assert not second.finish_reason
    harness.run(second)


def test_decoding_sessions_stay_within_the_quota() -> None:
    """The pool has enough pages. The quota has one more than the three sessions hold, which fill theirs in the same
    step."""
    harness = Harness()
    harness.limit(MINE, 4)
    harness.run(*(harness.submit(name, 3, max_tokens=8) for name in "abc"))


def test_a_session_that_can_never_fit_is_refused_with_the_quota_and_its_figures() -> None:
    harness = Harness()
    harness.limit(MINE, 3)
    with pytest.raises(QuotaExceeded, match="device_kv") as refusal:
        harness.submit("a", 13)
    assert refusal.value.data == {"quota": "device_kv", "limit": 3 * PAGE_BYTES, "used": 4 * PAGE_BYTES}
    harness.run(harness.submit("b", 13, THEIRS))


def test_an_output_ends_at_the_quota() -> None:
    harness = Harness()
    harness.limit(MINE, 3)
    request = harness.submit("a", 8, max_tokens=50)
    harness.run(request)
    assert request.finish_reason == "length" and len(harness.scheduler.session("a").tokens) == 12


def test_a_running_session_ends_normally_after_the_quota_is_lowered() -> None:
    harness = Harness()
    requests = [harness.submit(name, 10, max_tokens=8) for name in "ab"]
    harness.step()
    harness.scheduler.set_tenant(MINE, 1.0, PAGE_BYTES)
    harness.run(*requests)


def test_no_limit_applies_after_the_quota_is_removed() -> None:
    harness = Harness()
    harness.limit(MINE, 1)
    harness.limit(MINE, None)
    harness.run(harness.submit("a", 30))


def test_two_sessions_that_wait_for_each_other_s_pages_on_two_models_both_end() -> None:
    harness = Harness("m", "n")
    harness.limit(MINE, 6)
    first, second = harness.submit("a", 9, model="m", max_tokens=8), harness.submit("b", 9, model="n", max_tokens=8)
    harness.run(first)
    harness.run(second)


def test_a_held_session_of_another_model_is_evicted() -> None:
    harness = Harness("m", "n")
    harness.limit(MINE, 4)
    held = harness.submit("held", 9, model="n", max_tokens=8)
    harness.step()
    harness.scheduler.hold(held.id)
    harness.run(harness.submit("a", 9))
    harness.scheduler.release(held.id)
    harness.run(held)


def test_as_many_sessions_as_needed_leave_another_model_at_once() -> None:
    harness = Harness("m", "n")
    harness.limit(MINE, 10)
    for number in range(10):
        harness.run(harness.submit(f"idle{number}", 3, model="n", max_tokens=1))
    harness.submit("a", 36)
    assert harness.step() == ["a"]


@pytest.mark.parametrize("pages", [0, 1])
def test_sessions_end_one_after_another_under_a_quota_below_each(pages: int) -> None:
    harness = Harness()
    harness.run(harness.submit("idle", 9, max_tokens=2))
    requests = [harness.submit(name, 20, max_tokens=8) for name in "ab"]
    harness.step()
    harness.scheduler.set_tenant(MINE, 1.0, pages * PAGE_BYTES)
    harness.run(*requests)


def test_public_pages_do_not_count_as_room_for_other_sessions() -> None:
    harness = Harness()
    harness.kv["m"].public.mark([7] * 24, PAGE)
    for name, last in (("a", 1), ("b", 2), ("c", 3)):
        harness.scheduler.open(Session(name, "m", MINE, "agent"))
        request = Request(last, 0, 25, max_tokens=12)
        harness.scheduler.submit(name, request, [7] * 24 + [last])
        harness.step()
    harness.scheduler.set_tenant(MINE, 1.0, 3 * PAGE_BYTES)
    for _ in range(12):
        harness.step()
        assert harness.held(MINE) <= 3


def test_forks_do_not_exceed_the_quota() -> None:
    harness = Harness()
    harness.limit(MINE, 3)
    harness.run(harness.submit("parent", 7, max_tokens=3))
    for number in range(6):
        harness.scheduler.fork("parent", f"child{number}", "agent")
    assert harness.held(MINE) == 3
    harness.scheduler.check_integrity()


def test_imported_kv_does_not_exceed_the_quota() -> None:
    harness = Harness("m", "n")
    harness.limit(MINE, 4)
    harness.run(harness.submit("here", 6), harness.submit("there", 6, model="n"))
    imported = Session("imported", "m", MINE, "agent", tokens=[3] * 12)
    harness.scheduler.open(imported)
    assert harness.scheduler.secure("imported")
    assert harness.held(MINE) == 3
    harness.scheduler.open(Session("large", "m", MINE, "agent", tokens=[3] * 17))
    with pytest.raises(QuotaExceeded, match="device_kv"):
        harness.scheduler.secure("large")


def test_sessions_that_come_back_do_not_exceed_the_quota() -> None:
    harness = Harness()
    paging = harness.scheduler.queues["m"].residency.paging
    paging.use_host(Tier(bytearray(Tier.table_bytes(32)), 32))

    for name in "abcd":
        harness.run(harness.submit(name, 6))
        harness.scheduler.wait(name)
        all_leave(harness.scheduler)
        harness.copy_all()
    harness.kv["m"].resize(65)  # no page can be found on the device
    overwrite_free_pages(harness.kv["m"])
    harness.limit(MINE, 5)
    for name in "abcd":
        harness.scheduler.wake(name)
        harness.copy_all()
        assert harness.held(MINE) <= 5
    assert [harness.kv["m"].pages_held(name) for name in "abcd"] == [3, 0, 0, 0]
    harness.scheduler.wait("a")
    all_leave(harness.scheduler)
    harness.scheduler.wake("b")  # a's pages are still on the host, so they leave at once
    harness.copy_all()
    assert [harness.kv["m"].pages_held(name) for name in "abcd"] == [0, 3, 0, 0]


def test_a_session_that_finds_more_pages_than_it_had_does_not_exceed_the_quota() -> None:
    """It has never run, and finds all pages of its prompt on the device, which no session holds any more."""
    harness = Harness()
    harness.run(harness.submit("gone", 13, max_tokens=0))
    prompt = list(harness.scheduler.session("gone").tokens)
    harness.scheduler.close("gone")
    harness.run(harness.submit("idle", 6))
    harness.limit(MINE, 4)
    harness.scheduler.open(Session("new", "m", MINE, "agent", tokens=prompt))
    harness.scheduler.wake("new")
    assert harness.held(MINE) <= 4


def test_a_session_whose_last_page_is_replaced_while_it_is_copied_does_not_exceed_the_quota() -> None:
    harness = Harness()
    harness.scheduler.queues["m"].residency.paging.use_host(Tier(bytearray(Tier.table_bytes(32)), 32))
    harness.run(harness.submit("gone", 13, max_tokens=0))
    prompt = list(harness.scheduler.session("gone").tokens)
    harness.scheduler.close("gone")
    harness.scheduler.open(Session("s", "m", MINE, "agent"))
    harness.scheduler.submit("s", Request(100, 0, 6, 0), prompt[:6])
    assert harness.step() == ["s"]
    harness.limit(MINE, 4)
    harness.scheduler.wait("s")
    all_leave(harness.scheduler)
    harness.scheduler.wake("s")  # the pages that it needs after all are still being copied
    harness.scheduler.submit("s", Request(101, 6, 13, 0), prompt[6:])
    assert harness.step() == [] and harness.held(MINE) <= 4
    harness.copy_all()
    assert harness.step() == ["s"] and harness.held(MINE) == 4


def test_sessions_that_are_leaving_count_before_others_are_evicted() -> None:
    harness = Harness()
    paging = harness.scheduler.queues["m"].residency.paging
    paging.use_host(Tier(bytearray(Tier.table_bytes(32)), 32))
    harness.limit(MINE, 10)
    for name in ("a", "b", "c"):
        harness.run(harness.submit(name, 6))
    harness.submit("new", 10)
    for _ in range(3):
        assert harness.step() == []
    queue = harness.scheduler.queues["m"].residency
    assert [queue.is_leaving(harness.scheduler.session(name)) for name in "abc"] == [True, False, False]


def test_pages_freed_for_the_leading_model_are_not_taken_by_another() -> None:
    """Sessions of the other model wait in line, and its turn comes before."""
    harness = Harness("m", "n")
    harness.scheduler.queues["n"].residency.paging.use_host(Tier(bytearray(Tier.table_bytes(32)), 32))
    harness.limit(MINE, 6)
    first = harness.submit("first", 20)
    harness.scheduler.hold(first.id)
    for name in "bc":
        harness.submit(name, 9, model="n", max_tokens=3)
    harness.step()
    harness.submit("theirs", 5, THEIRS, max_tokens=40)
    harness.scheduler.release(first.id)
    held = []
    while not first.finish_reason and len(held) < 20:
        held.append(harness.kv["n"].pool.used)
        harness.step()
        harness.copy_all("n")
    assert held == sorted(held, reverse=True), "they have left, and come back before the first has ended"
    assert held[-1] == 0


class Residency(KvResidency):
    """Pages that begin to leave never become free."""

    begun = False

    def leaves(self, tenant: int) -> bool:
        return self.begun


class Holder:
    """A model; its foremost session has this claim."""

    def __init__(self, claim: Claim) -> None:
        self.kv = KvManager(17, PAGE, PAGE_BYTES, max_context=64)
        self.residency = Residency(Paging(self.kv))
        self.foremost = claim

    def claim(self, tenant: int) -> Claim | None:
        return self.foremost

    def retire(self, tenant: int, nbytes: int, *, active: bool) -> bool:
        self.residency.begun = active
        return active


def test_a_model_stops_leading_when_ageing_puts_another_first() -> None:
    """Otherwise the aged session would wait for the leader, and the leader for its pages."""
    quotas, m, n = DeviceQuotas(), Holder((0, 1)), Holder((0, 2))
    for holder in (m, n):
        quotas.add(holder)
    quotas.set(MINE, 6 * PAGE_BYTES)
    first, other = (Session(name, name, MINE, "agent", tokens=[1] * 20) for name in "mn")
    first.request = Request(1, 0, 20, 4)
    n.kv.reserve("n", MINE, 16)

    def has_way(session: Session, holder: Holder) -> bool:
        return quotas.make_way(session, KvResidency(Paging(holder.kv)), lambda: [])

    assert not has_way(first, m)
    first.passed_over = QUOTA
    assert not has_way(other, n), "what becomes free there is the first one's"
    n.foremost = (-1, 2)
    assert has_way(other, n)
