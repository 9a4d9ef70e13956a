"""Where a draft has the KV of the sessions that it guesses for: in free pages of its own pool, which are lent to it.

No call waits for this KV, which can be computed again from the session's tokens. So it has no place in a lower tier and
counts for no quota, and as soon as the draft's own sessions need the pages, they have them. If too few pages are free,
the session that the draft has not guessed for longest loses its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.page_pool import SCRATCH


class DraftPages:
    """The pages of one draft for one target model. `kv`: the draft's."""

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._pages: dict[str, list[int]] = {}  # by session, the least recently used first
        self._reclaimed = kv.pool.reclaimed  # as of the last call of `lost`
        self._evicted: list[str] = []  # sessions, since that call

    def lost(self) -> list[str]:
        """Sessions that have lost pages since the last call. They hold none now."""
        pool, (evicted, self._evicted) = self._kv.pool, (self._evicted, [])
        if pool.reclaimed == self._reclaimed:
            return evicted
        self._reclaimed = pool.reclaimed
        found = [session for session, pages in self._pages.items() if not pool.is_lent(pages)]
        for session in found:
            self.drop(session)
        return evicted + found

    def reserve(self, session_id: str, tenant: int, tokens: int, keep: Collection[str]) -> bool:
        """Gives the session pages until `tokens` tokens fit. Other sessions lose theirs for it, but none in `keep`. →
        False if there are too few pages."""
        assert tokens <= self._kv.max_context, f"{tokens} tokens for a context of {self._kv.max_context}"
        held = self._pages.pop(session_id, [])
        self._pages[session_id] = held  # the most recently used
        wanted = self._kv.pages_for(tokens) - len(held)
        while wanted > 0:
            pages = self._kv.lend(tenant, wanted)
            if pages is not None:
                held += pages
                break
            victim = next((name for name in self._pages if name not in keep and name != session_id), None)
            if victim is None:
                return False
            self._evicted.append(victim)
            self.drop(victim)
        return True

    def drop(self, session_id: str) -> None:
        """Gives the session's pages back. No effect if it holds none."""
        self._kv.pool.give_back(self._pages.pop(session_id, ()))

    def close(self) -> None:
        for session_id in list(self._pages):
            self.drop(session_id)

    def pages_held(self, session_id: str) -> int:
        return len(self._pages[session_id])

    def page_table(self, session_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """int32 [sessions, width]: each session's pages, padded with the scratch page."""
        pages = [self._pages[session_id] for session_id in session_ids]
        table = np.full((len(pages), max(map(len, pages))), SCRATCH, np.int32)
        for row, some in zip(table, pages, strict=True):
            row[: len(some)] = some
        return table
