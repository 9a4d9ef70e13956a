"""Whose pages make room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from djinn_client.protocol import CLASSES
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager


def first_that_free(
    kv: KvManager, missing: int, candidates: Iterable[Session], tenant: int | None = None
) -> tuple[list[Session], int]:
    """Of the first candidates whose pages together free `missing`, those that it takes, and how many that frees;
    nobody where all of them free fewer. A page is free when the last that holds it is a victim. `tenant`: only
    pages that are his count."""
    victims: dict[Session, list[int]] = {}
    freed = 0
    given: Counter[int] = Counter()  # references, by page

    def is_free(page: int) -> bool:
        is_his = tenant is None or kv.pool.tenant(page) == tenant
        return is_his and given[page] == kv.holders(page)

    for candidate in candidates:
        pages = victims[candidate] = kv.pages_of(candidate.id)
        given.update(pages)
        freed += sum(map(is_free, pages))
        if freed >= missing:
            return [victim for victim, pages in victims.items() if any(map(is_free, pages))], freed
    return [], 0


UNKNOWN_S = 60.0  # after which whoever says nothing is taken to be wanted, at the earliest


def wanted_at(session: Session, now: float) -> float:
    """When a session that makes room is likely to be back; 0: soon, or its KV cannot be computed. Where nobody knows,
    it may be soon in the highest class; and it is at once where a call runs on it."""
    if session.request is not None or session.called or session.foreign_tokens:
        return 0.0
    if session.wakes_at:
        return session.wakes_at
    return 0.0 if session.klass == CLASSES[0] else now + UNKNOWN_S
