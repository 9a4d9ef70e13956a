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
from djinnd.scheduler.device_quotas import Claim, DeviceQuotas
from djinnd.scheduler.residence import Residence
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.why import QUOTA
from tests.support.copies import copies
from tests.support.departures import all_leave

PAGE = 4  # tokens
PAGE_BYTES = 1 << 20
MINE, THEIRS = 1000, 1001


class Daemon:
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
        for over in copies(self.scheduler.residence(model).paging.moves):
            self.scheduler.over(model, over)

    def run(self, *requests: Request) -> None:
        for _ in range(200):
            if all(request.finish_reason for request in requests):
                return
            self.step()
        raise AssertionError([request.state for request in requests])


def test_sessions_within_the_quota_all_run_at_once() -> None:
    daemon = Daemon()
    daemon.limit(MINE, 4)
    daemon.submit("a", 5), daemon.submit("b", 5)
    assert daemon.step() == ["a", "b"]


def test_a_session_that_would_exceed_the_quota_waits_and_says_so() -> None:
    daemon = Daemon()
    daemon.limit(MINE, 3)
    first, second = daemon.submit("a", 5), daemon.submit("b", 5)
    theirs = daemon.submit("c", 40, THEIRS)
    assert daemon.step() == ["a", "c"]
    assert "quota device_kv" in daemon.scheduler.why("b").reason
    daemon.run(first, second, theirs)


def test_only_idle_sessions_of_the_same_tenant_are_evicted() -> None:
    daemon = Daemon()
    daemon.limit(MINE, 3)
    daemon.run(daemon.submit("mine", 8), daemon.submit("theirs", 8, THEIRS))
    before = daemon.kv["m"].pages_held("theirs")
    daemon.run(daemon.submit("next", 8))
    assert daemon.kv["m"].pages_held("mine") == 0 and daemon.kv["m"].pages_held("theirs") == before


def test_idle_sessions_of_other_models_are_evicted() -> None:
    daemon = Daemon("m", "n")
    daemon.limit(MINE, 3)
    daemon.run(daemon.submit("there", 8, model="n"))
    daemon.run(daemon.submit("here", 8))
    assert daemon.kv["n"].pages_held("there") == 0


def test_the_later_session_is_evicted_for_the_earlier_one() -> None:
    daemon = Daemon()
    daemon.limit(MINE, 4)
    first, second = daemon.submit("a", 6, max_tokens=10), daemon.submit("b", 6, max_tokens=10)
    daemon.run(first)
    assert not second.finish_reason
    daemon.run(second)


def test_decoding_sessions_stay_within_the_quota() -> None:
    """The pool has enough pages. The quota has one more than the three sessions hold, which fill theirs in the same
    step."""
    daemon = Daemon()
    daemon.limit(MINE, 4)
    daemon.run(*(daemon.submit(name, 3, max_tokens=8) for name in "abc"))


def test_a_session_that_can_never_fit_is_refused_with_the_quota_and_its_figures() -> None:
    daemon = Daemon()
    daemon.limit(MINE, 3)
    with pytest.raises(QuotaExceeded, match="device_kv") as refusal:
        daemon.submit("a", 13)
    assert refusal.value.data == {"quota": "device_kv", "limit": 3 * PAGE_BYTES, "used": 4 * PAGE_BYTES}
    daemon.run(daemon.submit("b", 13, THEIRS))


def test_an_output_ends_at_the_quota() -> None:
    daemon = Daemon()
    daemon.limit(MINE, 3)
    request = daemon.submit("a", 8, max_tokens=50)
    daemon.run(request)
    assert request.finish_reason == "length" and len(daemon.scheduler.session("a").tokens) == 12


def test_a_running_session_ends_normally_after_the_quota_is_lowered() -> None:
    daemon = Daemon()
    requests = [daemon.submit(name, 10, max_tokens=8) for name in "ab"]
    daemon.step()
    daemon.scheduler.set_tenant(MINE, 1.0, PAGE_BYTES)
    daemon.run(*requests)


def test_no_limit_applies_after_the_quota_is_removed() -> None:
    daemon = Daemon()
    daemon.limit(MINE, 1)
    daemon.limit(MINE, None)
    daemon.run(daemon.submit("a", 30))


def test_two_sessions_that_wait_for_each_other_s_pages_on_two_models_both_end() -> None:
    daemon = Daemon("m", "n")
    daemon.limit(MINE, 6)
    first, second = daemon.submit("a", 9, model="m", max_tokens=8), daemon.submit("b", 9, model="n", max_tokens=8)
    daemon.run(first)
    daemon.run(second)


def test_a_held_session_of_another_model_is_evicted() -> None:
    daemon = Daemon("m", "n")
    daemon.limit(MINE, 4)
    held = daemon.submit("held", 9, model="n", max_tokens=8)
    daemon.step()
    daemon.scheduler.hold(held.id)
    daemon.run(daemon.submit("a", 9))
    daemon.scheduler.release(held.id)
    daemon.run(held)


def test_as_many_sessions_as_needed_leave_another_model_at_once() -> None:
    daemon = Daemon("m", "n")
    daemon.limit(MINE, 10)
    for number in range(10):
        daemon.run(daemon.submit(f"idle{number}", 3, model="n", max_tokens=1))
    daemon.submit("a", 36)
    assert daemon.step() == ["a"]


@pytest.mark.parametrize("pages", [0, 1])
def test_sessions_end_one_after_another_under_a_quota_below_each(pages: int) -> None:
    daemon = Daemon()
    daemon.run(daemon.submit("idle", 9, max_tokens=2))
    requests = [daemon.submit(name, 20, max_tokens=8) for name in "ab"]
    daemon.step()
    daemon.scheduler.set_tenant(MINE, 1.0, pages * PAGE_BYTES)
    daemon.run(*requests)


def test_public_pages_do_not_count_as_room_for_other_sessions() -> None:
    daemon = Daemon()
    daemon.kv["m"].public.mark([7] * 24, PAGE)
    for name, last in (("a", 1), ("b", 2), ("c", 3)):
        daemon.scheduler.open(Session(name, "m", MINE, "agent"))
        request = Request(last, 0, 25, max_tokens=12)
        daemon.scheduler.submit(name, request, [7] * 24 + [last])
        daemon.step()
    daemon.scheduler.set_tenant(MINE, 1.0, 3 * PAGE_BYTES)
    for _ in range(12):
        daemon.step()
        assert daemon.held(MINE) <= 3


def test_forks_do_not_exceed_the_quota() -> None:
    daemon = Daemon()
    daemon.limit(MINE, 3)
    daemon.run(daemon.submit("parent", 7, max_tokens=3))
    for number in range(6):
        daemon.scheduler.fork("parent", f"child{number}", "agent")
    assert daemon.held(MINE) == 3
    daemon.scheduler.check_integrity()


def test_imported_kv_does_not_exceed_the_quota() -> None:
    daemon = Daemon("m", "n")
    daemon.limit(MINE, 4)
    daemon.run(daemon.submit("here", 6), daemon.submit("there", 6, model="n"))
    imported = Session("imported", "m", MINE, "agent", tokens=[3] * 12)
    daemon.scheduler.open(imported)
    assert daemon.scheduler.secure("imported")
    assert daemon.held(MINE) == 3
    daemon.scheduler.open(Session("large", "m", MINE, "agent", tokens=[3] * 17))
    with pytest.raises(QuotaExceeded, match="device_kv"):
        daemon.scheduler.secure("large")


def test_sessions_that_come_back_do_not_exceed_the_quota() -> None:
    daemon = Daemon()
    paging = daemon.scheduler.residence("m").paging
    paging.use_host(Tier(bytearray(Tier.table_bytes(32)), 32))

    for name in "abcd":
        daemon.run(daemon.submit(name, 6))
        daemon.scheduler.wait(name)
        all_leave(daemon.scheduler)
        daemon.copy_all()
    daemon.kv["m"].resize(65)  # no page can be found on the device
    daemon.kv["m"]._prefixes.forget(range(1, 65))
    daemon.limit(MINE, 5)
    for name in "abcd":
        daemon.scheduler.wake(name)
        daemon.copy_all()
        assert daemon.held(MINE) <= 5
    assert [daemon.kv["m"].pages_held(name) for name in "abcd"] == [3, 0, 0, 0]
    daemon.scheduler.wait("a")
    all_leave(daemon.scheduler)
    daemon.scheduler.wake("b")  # a's pages are still on the host, so they leave at once
    daemon.copy_all()
    assert [daemon.kv["m"].pages_held(name) for name in "abcd"] == [0, 3, 0, 0]


def test_a_session_that_finds_more_pages_than_it_had_does_not_exceed_the_quota() -> None:
    """It has never run, and finds all pages of its prompt on the device, which no session holds any more."""
    daemon = Daemon()
    daemon.run(daemon.submit("gone", 13, max_tokens=0))
    prompt = list(daemon.scheduler.session("gone").tokens)
    daemon.scheduler.close("gone")
    daemon.run(daemon.submit("idle", 6))
    daemon.limit(MINE, 4)
    daemon.scheduler.open(Session("new", "m", MINE, "agent", tokens=prompt))
    daemon.scheduler.wake("new")
    assert daemon.held(MINE) <= 4


def test_a_session_whose_last_page_is_replaced_while_it_is_copied_does_not_exceed_the_quota() -> None:
    daemon = Daemon()
    daemon.scheduler.residence("m").paging.use_host(Tier(bytearray(Tier.table_bytes(32)), 32))
    daemon.run(daemon.submit("gone", 13, max_tokens=0))
    prompt = list(daemon.scheduler.session("gone").tokens)
    daemon.scheduler.close("gone")
    daemon.scheduler.open(Session("s", "m", MINE, "agent"))
    daemon.scheduler.submit("s", Request(100, 0, 6, 0), prompt[:6])
    assert daemon.step() == ["s"]
    daemon.limit(MINE, 4)
    daemon.scheduler.wait("s")
    all_leave(daemon.scheduler)
    daemon.scheduler.wake("s")  # the pages that it needs after all are still being copied
    daemon.scheduler.submit("s", Request(101, 6, 13, 0), prompt[6:])
    assert daemon.step() == [] and daemon.held(MINE) <= 4
    daemon.copy_all()
    assert daemon.step() == ["s"] and daemon.held(MINE) == 4


def test_sessions_that_are_leaving_count_before_others_are_evicted() -> None:
    daemon = Daemon()
    paging = daemon.scheduler.residence("m").paging
    paging.use_host(Tier(bytearray(Tier.table_bytes(32)), 32))
    daemon.limit(MINE, 10)
    for name in ("a", "b", "c"):
        daemon.run(daemon.submit(name, 6))
    daemon.submit("new", 10)
    for _ in range(3):
        assert daemon.step() == []
    queue = daemon.scheduler.residence("m")
    assert [queue.is_leaving(daemon.scheduler.session(name)) for name in "abc"] == [True, False, False]


def test_pages_freed_for_the_leading_model_are_not_taken_by_another() -> None:
    """Sessions of the other model wait in line, and its turn comes before."""
    daemon = Daemon("m", "n")
    daemon.scheduler.residence("n").paging.use_host(Tier(bytearray(Tier.table_bytes(32)), 32))
    daemon.limit(MINE, 6)
    first = daemon.submit("first", 20)
    daemon.scheduler.hold(first.id)
    for name in "bc":
        daemon.submit(name, 9, model="n", max_tokens=3)
    daemon.step()
    daemon.submit("theirs", 5, THEIRS, max_tokens=40)
    daemon.scheduler.release(first.id)
    held = []
    while not first.finish_reason and len(held) < 20:
        held.append(daemon.kv["n"].pool.used)
        daemon.step()
        daemon.copy_all("n")
    assert held == sorted(held, reverse=True), "they have left, and come back before the first has ended"
    assert held[-1] == 0


class Holder:
    """A model whose foremost session has this claim. Pages of its evicted sessions never become free."""

    def __init__(self, claim: Claim) -> None:
        self.kv = KvManager(17, PAGE, PAGE_BYTES, max_context=64)
        self.foremost = claim
        self.pages_move = False  # False although they leave

    def claim(self, tenant: int) -> Claim | None:
        return self.foremost

    def leaves(self, tenant: int) -> bool:
        return self.pages_move

    def retire(self, tenant: int, nbytes: int, *, active: bool) -> bool:
        self.pages_move = active
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
        return quotas.make_way(session, Residence(Paging(holder.kv)), lambda: [])

    assert not has_way(first, m)
    first.passed_over = QUOTA
    assert not has_way(other, n), "what becomes free there is the first one's"
    n.foremost = (-1, 2)
    assert has_way(other, n)
