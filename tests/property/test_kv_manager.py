"""Block tables beside a dict of lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.page_pool import SCRATCH, OutOfPages

MAX_CONTEXT = 40
SESSIONS = st.sampled_from([f"s{i}" for i in range(20)])  # more sessions than the table's first rows


def tenant_of(session: str) -> int:
    return int(session[1:]) % 3


class KvManagerMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 60), page_size=st.integers(1, 5))
    def begin(self, capacity: int, page_size: int) -> None:
        self.kv = KvManager(capacity + 1, page_size, page_size * 10, MAX_CONTEXT)
        self.capacity = capacity
        self.page_size = page_size
        self.pages: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        return self.capacity - len({page for pages in self.pages.values() for page in pages})

    def pages_for(self, tokens: int) -> int:
        return len(range(0, tokens, self.page_size))

    @rule(session=SESSIONS, tokens=st.integers(0, MAX_CONTEXT))
    def reserve(self, session: str, tokens: int) -> None:
        before = self.pages.get(session, [])
        missing = max(0, self.pages_for(tokens) - len(before))
        tenant = tenant_of(session)
        if missing > self.free:
            with pytest.raises(OutOfPages) as caught:
                self.kv.reserve(session, tenant, tokens)
            assert (caught.value.needed, caught.value.free) == (missing, self.free)
            return
        self.kv.reserve(session, tenant, tokens)
        after = self.kv.pages_of(session)
        assert after[: len(before)] == before and len(after) == len(before) + missing
        if after:
            self.pages[session] = after

    @rule(session=SESSIONS, tokens=st.integers(0, MAX_CONTEXT))
    def trim(self, session: str, tokens: int) -> None:
        """The session writes from there on, so it keeps no part of a page that another session holds."""
        left = self.kv.trim(session, tokens)
        kept = self.pages.pop(session, [])[: self.pages_for(tokens)]
        others = {page for pages in self.pages.values() for page in pages}
        if kept and tokens < len(kept) * self.page_size and kept[-1] in others:
            kept.pop()
        if kept:
            self.pages[session] = kept
        assert left == min(tokens, len(kept) * self.page_size)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.pages)))
        tenant, pages = tenant_of(parent), self.pages[parent]
        unused = [f"s{i}" for i in range(20) if f"s{i}" not in self.pages and tenant_of(f"s{i}") == tenant]
        if not unused:
            return
        child, free = unused[0], self.free
        rest = data.draw(st.integers(0, self.page_size - 1))
        tokens = len(pages) * self.page_size - rest
        computed, copy = self.kv.fork(parent, child, tenant, tokens)
        after, full = self.kv.pages_of(child), tokens // self.page_size
        assert after[:full] == pages[:full]
        if rest and free:
            assert copy == (pages[full], after[full]) and self.free - 1 == self.kv.pool.free
            assert (len(after), computed) == (full + 1, tokens)
        else:
            assert copy is None and (len(after), computed) == (full, full * self.page_size)
        if after:
            self.pages[child] = after

    @rule(session=SESSIONS)
    def drop(self, session: str) -> None:
        self.kv.drop(session)
        self.pages.pop(session, None)

    @rule(capacity=st.integers(1, 60))
    def resize(self, capacity: int) -> None:
        if capacity < self.capacity - self.free:
            return
        places = self.kv.resize(capacity + 1)
        self.capacity = capacity
        self.pages = {session: [places[page] for page in pages] for session, pages in self.pages.items()}
        assert self.kv.capacity_tokens == capacity * self.page_size

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def page_table(self, data: st.DataObject) -> None:
        sessions = data.draw(st.lists(st.sampled_from(sorted(self.pages)), min_size=1))
        width = max(len(self.pages[session]) for session in sessions)
        padded = [[*self.pages[session], *[SCRATCH] * (width - len(self.pages[session]))] for session in sessions]
        assert self.kv.page_table(sessions).tolist() == padded

    @invariant()
    def agrees(self) -> None:
        self.kv.check_integrity()
        assert self.kv.sessions == self.pages.keys()
        for session, pages in self.pages.items():
            assert self.kv.pages_of(session) == pages and self.kv.pages_held(session) == len(pages)
            assert len(set(pages)) == len(pages)
        tenants: dict[int, set[int]] = {}
        for session, pages in self.pages.items():
            for page in pages:
                tenants.setdefault(page, set()).add(tenant_of(session))
        assert SCRATCH not in tenants and len(tenants) == self.kv.pool.used
        assert all(len(holders) == 1 for holders in tenants.values())
        used = Counter(tenant for holders in tenants.values() for tenant in holders)
        assert all(self.kv.pool.used_by(tenant) == used[tenant] for tenant in range(3))


class TestKvManager(KvManagerMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.long
class TestKvManagerAtLength(KvManagerMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40)
