"""Whose pages make room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from djinn_client.protocol import CLASSES
from djinnd.core.session import Session
from djinnd.kvcache.left_pages import LeftPages
from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.prefixes import Key


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


def is_wanted_later(session: Session, lost: Collection[Key], left: LeftPages, now: float) -> bool:
    """Than all of these pages, which would be nowhere any more if a lower tier took those of a session that makes room:
    then it is its own that are computed anew (Belady, "A study of replacement algorithms for a virtual-storage
    computer", IBM Systems Journal 1966). Where nobody knows when it is wanted, it may be soon in the highest class; and
    it is at once where a call runs on it."""
    is_known = session.wakes_at > 0
    is_wanted_soon = session.request is not None or session.called or (session.klass == CLASSES[0] and not is_known)
    if not lost or session.foreign_tokens or is_wanted_soon:
        return False
    wanted_at = session.wakes_at if is_known else now + UNKNOWN_S
    return all(left.wanted_at(key) <= wanted_at for key in lost)
