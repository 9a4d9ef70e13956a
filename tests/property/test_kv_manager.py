"""Page tables beside a dict of lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.page_pool import SCRATCH, OutOfPages

MAX_CONTEXT = 40
SESSIONS = st.sampled_from([f"s{i}" for i in range(20)])  # more than the table's first rows


class KvManagerMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 60), page_size=st.integers(1, 5))
    def begin(self, capacity: int, page_size: int) -> None:
        self.kv = KvManager(capacity + 1, page_size, page_size * 10, MAX_CONTEXT)
        self.capacity = capacity
        self.page_size = page_size
        self.pages: dict[str, list[int]] = {}

    def pages_for(self, tokens: int) -> int:
        return len(range(0, tokens, self.page_size))

    @rule(session=SESSIONS, tokens=st.integers(0, MAX_CONTEXT))
    def reserve(self, session: str, tokens: int) -> None:
        before = self.pages.get(session, [])
        missing = max(0, self.pages_for(tokens) - len(before))
        free = self.capacity - sum(map(len, self.pages.values()))
        tenant = int(session[1:]) % 3
        if missing > free:
            with pytest.raises(OutOfPages) as caught:
                self.kv.reserve(session, tenant, tokens)
            assert (caught.value.needed, caught.value.free) == (missing, free)
            return
        self.kv.reserve(session, tenant, tokens)
        after = self.kv.pages_of(session)
        assert after[: len(before)] == before and len(after) == len(before) + missing
        if after:
            self.pages[session] = after

    @rule(session=SESSIONS, tokens=st.integers(0, MAX_CONTEXT))
    def trim(self, session: str, tokens: int) -> None:
        self.kv.trim(session, tokens)
        kept = self.pages.pop(session, [])[: self.pages_for(tokens)]
        if kept:
            self.pages[session] = kept

    @rule(session=SESSIONS)
    def drop(self, session: str) -> None:
        self.kv.drop(session)
        self.pages.pop(session, None)

    @rule(capacity=st.integers(1, 60))
    def resize(self, capacity: int) -> None:
        if capacity < sum(map(len, self.pages.values())):
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

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def slots(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.pages)))
        every = [page * self.page_size + i for page in self.pages[session] for i in range(self.page_size)]
        start = data.draw(st.integers(0, len(every)))
        count = data.draw(st.integers(0, len(every) - start))
        assert self.kv.slots(session, start, count).tolist() == every[start : start + count]

    @invariant()
    def agrees(self) -> None:
        self.kv.check_integrity()
        assert self.kv.sessions == self.pages.keys()
        for session, pages in self.pages.items():
            assert self.kv.pages_of(session) == pages and self.kv.pages_held(session) == len(pages)
        held = [page for pages in self.pages.values() for page in pages]
        assert SCRATCH not in held and len(set(held)) == len(held) == self.kv.pool.used


TestKvManager = KvManagerMachine.TestCase
TestKvManager.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
