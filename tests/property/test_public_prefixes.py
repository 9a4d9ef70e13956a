"""Tenants share public pages and no others; checked beside a list of what was marked."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.page_pool import OutOfPages

PAGE = 2
TENANTS = st.sampled_from([1000, 1001, 1002])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)  # two kinds of tokens, so that prefixes often meet


class PublicPrefixesMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(4, 40))
    def begin(self, capacity: int) -> None:
        self.kv = KvManager(capacity + 1, PAGE, page_bytes=1, max_context=64)
        self.count = 0
        self.marked: set[tuple[int, ...]] = set()  # ends of public pages
        self.sessions: dict[str, tuple[int, bytes, list[int]]] = {}
        self.holds: dict[int, tuple[int, ...]] = {}  # all tokens up to the end of each page in use

    @rule(tokens=TOKENS)
    def mark(self, tokens: list[int]) -> None:
        self.kv.public.mark(tokens, PAGE)
        self.marked |= {tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)}

    @rule(tenant=TENANTS, tokens=TOKENS, salted=st.booleans())
    def open(self, tenant: int, tokens: list[int], salted: bool) -> None:
        self.count += 1
        self.extend_to(f"s{self.count}", tenant, str(self.count).encode() if salted else b"", tokens)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), more=TOKENS)
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        tenant, salt, tokens = self.sessions[name]
        self.extend_to(name, tenant, salt, (tokens + more)[:60])

    def extend_to(self, name: str, tenant: int, salt: bytes, tokens: list[int]) -> None:
        kv = self.kv
        before = len(self.sessions[name][2]) if name in self.sessions else 0
        computed = kv.adopt(name, tenant, tokens, before, len(tokens), salt)
        try:
            kv.reserve(name, tenant, len(tokens))
        except OutOfPages:
            kv.drop(name)
            self.sessions.pop(name, None)
            return
        pages = kv.pages_of(name)
        for place in range(before // PAGE, computed // PAGE):
            assert self.holds.get(pages[place]) == tuple(tokens[: (place + 1) * PAGE]), "it found another page's KV"
        for place in range(computed // PAGE, len(tokens) // PAGE):
            self.holds[pages[place]] = tuple(tokens[: (place + 1) * PAGE])
        if len(tokens) % PAGE:
            self.holds[pages[-1]] = tuple(tokens)
        kv.publish(name, tenant, tokens, len(tokens), salt)
        self.sessions[name] = (tenant, salt, tokens)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        tenant, salt, tokens = self.sessions[name]
        length = data.draw(st.integers(0, len(tokens)))
        left = self.kv.trim(name, length)
        if left:
            self.sessions[name] = (tenant, salt, tokens[:left])
            if left % PAGE:
                self.holds[self.kv.pages_of(name)[-1]] = tuple(tokens[:left])
        else:
            del self.sessions[name]

    @invariant()
    def agrees(self) -> None:
        self.kv.check_integrity()
        holders: dict[int, set[tuple[int, bytes]]] = {}
        for name, (tenant, salt, tokens) in self.sessions.items():
            for place, page in enumerate(self.kv.pages_of(name)):
                assert self.holds[page] == tuple(tokens[: (place + 1) * PAGE])
                holders.setdefault(page, set()).add((tenant, salt))
        for page, whose in holders.items():
            if len(whose) > 1:
                assert self.holds[page] in self.marked, "tenants share a page that nobody has marked"
                assert not any(salt for _, salt in whose), "KV of a client is shared"
                assert self.kv.pool.is_public(page)


TestPublicPrefixes = PublicPrefixesMachine.TestCase
TestPublicPrefixes.settings = settings(max_examples=100, stateful_step_count=40)
