"""Chooses which sessions are evicted, and estimates when they return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from djinn_client.protocol import CLASSES
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.tuning import EVICTION


def first_that_free(
    kv: KvManager, missing: int, candidates: Iterable[Session], tenant: int | None = None
) -> tuple[list[Session], int]:
    """The sessions to evict to free `missing` pages, taken from the first candidates, and how many pages they free.
    Returns none if all candidates together free fewer.

    A page is free when its last holder is evicted. `tenant`: only this tenant's pages count.
    """
    victims: dict[Session, list[int]] = {}
    freed = 0
    given: Counter[int] = Counter()  # references given up, by page

    def is_free(page: int) -> bool:
        is_own = tenant is None or kv.pool.tenant(page) == tenant
        return is_own and given[page] == kv.holders(page)

    for candidate in candidates:
        pages = victims[candidate] = kv.pages_of(candidate.id)
        given.update(pages)
        freed += sum(map(is_free, pages))
        if freed >= missing:
            return [victim for victim, pages in victims.items() if any(map(is_free, pages))], freed
    return [], 0


def wanted_at(session: Session, now: float) -> float:
    """When an evicted session is likely to return. 0 means soon, or that its KV cannot be recomputed. Without an
    expected time, the highest class may return soon. A session with a request returns at once."""
    if session.request is not None or session.called or session.foreign_tokens:
        return 0.0
    if session.wakes_at:
        return session.wakes_at
    return 0.0 if session.priority == CLASSES[0] else now + EVICTION.unknown_s
