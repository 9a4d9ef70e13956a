"""The block tables of one model's sessions.

           ┌───┬───┬───┬───┬───┬───┐
    row 0  │ 7 │ 2 │ 9 │ 0 │ 0 │ 0 │   int32 [rows, pages of the longest session], a row a session that holds pages.
    row 1  │ 4 │ 0 │ 0 │ 0 │ 0 │ 0 │   Row 0 holds 3; the rest, and all of a free row, is the scratch page.
    row 2  │ 0 │ 0 │ 0 │ 0 │ 0 │ 0 │   The number of rows grows by doubling.
           └───┴───┴───┴───┴───┴───┘
Token i of a session is in page table[row, i // page_size], so the tables of a batch are one fancy index.

Sessions share pages. A fork shares its parent's, and sessions of a tenant that begin with the same tokens share the
pages of the first. Only full pages are shared, and a session writes only behind the KV that it has, so a shared page is
never written. `trim` gives up a shared page rather than keep a part of it.

Pages of a hybrid model have states beside KV: see `has_state`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import KeysView, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from djinnd.kvcache.neighbours import rising_with
from djinnd.kvcache.page_pool import SCRATCH, PagePool
from djinnd.kvcache.prefixes import Key, PrefixIndex, PublicPrefixes, root
from djinnd.kvcache.tuning import FIRST_ROWS, MOST_STATE_TOKENS, PAGE_BYTES


def page_size_for(token_bytes: int, state_bytes: int = 0) -> int:
    """Tokens in a page, if a token has `token_bytes` of KV in all blocks: the power of two from 16 to 256 that brings a
    page nearest to 4 MiB.

    A page of a hybrid model has a state of `state_bytes` beside its KV. Its size is the power of two, up to
    MOST_STATE_TOKENS, at which the KV is about as large as the state: so states at most double what a long session
    takes, and a session that is cut computes at most a page of tokens again. Without KV it has MOST_STATE_TOKENS.
    """
    assert token_bytes + state_bytes > 0
    if not token_bytes:
        return MOST_STATE_TOKENS
    size = 1 << min(max(round(math.log2(PAGE_BYTES / token_bytes)), 4), 8)
    while state_bytes > size * token_bytes and size < MOST_STATE_TOKENS:
        size *= 2
    return size


class PageCopy(NamedTuple):
    """A copy of a whole page. The device makes it before anything else is written to `target`."""

    source: int
    target: int


class KvManager:
    """Maps the tokens of sessions to pages. It knows a session while the session holds pages."""

    def __init__(
        self, num_pages: int, page_size: int, page_bytes: int, max_context: int, *, keeps_states: bool = False
    ) -> None:
        """`num_pages` includes the scratch page. `page_bytes` is only for figures. `max_context` is in tokens.
        `keeps_states`: pages have states of a hybrid model, see `has_state`."""
        assert page_size > 0 and max_context > 0
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.max_context = max_context
        self._table: npt.NDArray[np.int32] = np.full((FIRST_ROWS, self._width), SCRATCH, np.int32)
        self._row: dict[str, int] = {}
        self._held = [0] * FIRST_ROWS  # pages held, by row
        self._keys: dict[str, list[Key]] = {}  # by session: keys of its first pages, as far as `publish` has made them
        self.public = PublicPrefixes()
        self._prefixes = PrefixIndex()
        self._protected: Counter[int] = Counter()  # references to pages that no table has: pages that are being copied
        self._read: dict[int, int] = {}  # for each protected page, how many of its first tokens must not be written
        self._stranded: set[int] = set()  # protected pages that no session holds
        self._free_rows = list(range(FIRST_ROWS - 1, -1, -1))
        self.keeps_states = keeps_states
        self._state_at: dict[str, int] = {}  # by session: the position of the state in its partly filled last page
        self.changes = 0  # rises when a page gets one holder more or less, except its first holder

    @property
    def _width(self) -> int:
        return min(self.pages_for(self.max_context), self.pool.capacity)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of a session that has the whole pool to itself."""
        return self.pool.capacity * self.page_size

    @property
    def sessions(self) -> KeysView[str]:
        """Ids of the sessions that hold pages."""
        return self._row.keys()

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def pages_held(self, session_id: str) -> int:
        row = self._row.get(session_id)
        return 0 if row is None else self._held[row]

    def fits(self, session_id: str, tokens: int) -> bool:
        """True if the session holds pages for `tokens` tokens."""
        row = self._row.get(session_id)
        return row is not None and self._held[row] * self.page_size >= tokens

    def pages_of(self, session_id: str) -> list[int]:
        """The session's pages in the order of its tokens; empty if it holds none."""
        row = self._row.get(session_id)
        return [] if row is None else self._pages(row).tolist()

    def reserve(self, session_id: str, tenant: int, tokens: int) -> None:
        """Gives the session pages until `tokens` tokens fit. Raises OutOfPages, and has then changed nothing."""
        assert tokens <= self.max_context, f"{tokens} tokens for a context of {self.max_context}"
        row = self._row.get(session_id)
        held = 0 if row is None else self._held[row]
        wanted = self.pages_for(tokens)
        if wanted <= held:
            return
        pages = self.pool.allocate(wanted - held, tenant)
        self._prefixes.forget(pages)
        self._append(session_id, pages)

    def extend(self, session_id: str, tenant: int, places: Sequence[int]) -> list[int]:
        """Gives the session one more page for each of these places, such as slots of the host. The caller fills each
        page whole from its place before the page is read. The higher place gets the higher page. Raises OutOfPages, and
        has then changed nothing."""
        pages = rising_with(places, self.pool.allocate(len(places), tenant, overwritten=True))
        self._prefixes.forget(pages)
        self._append(session_id, pages)
        return pages

    def arrived(self, session_id: str, keys: Sequence[Key], tokens: int) -> None:
        """Notes that the session's last pages, which came from `extend`, now hold the KV of these keys. All its pages
        together hold the KV of `tokens` tokens."""
        own = self._keys[session_id]
        self.set_state(session_id, tokens)
        first = self.pages_held(session_id) - len(keys)
        assert len(own) == first, f"session {session_id} has {len(own)} keys of the {first} pages before"
        own += keys[: tokens // self.page_size - first]
        for page, key in enumerate(own[first:], first):
            self._know(key, int(self._table[self._row[session_id], page]))

    def lend(self, tenant: int, count: int) -> list[int] | None:
        """Lends free pages for scratch memory of the tenant: see PagePool.lend. No session finds their prefixes any
        more."""
        pages = self.pool.lend(count, tenant)
        if pages is not None:
            self._prefixes.forget(pages)
        return pages

    # --- states of hybrid models --------------------------------------------------------------------------------------

    def has_state(self, session_id: str, tokens: int) -> bool:
        """True if the session, which has the KV of its first `tokens` tokens, can go on after them.

        A page of a hybrid model has one state, which is that after the last token that was run in this page. KV may be
        written again at any position, but a state cannot go back inside a page. So a session can go on at the end of a
        page, or where the state of its last page stands.
        """
        return not self.keeps_states or tokens % self.page_size == 0 or self._state_at.get(session_id) == tokens

    def set_state(self, session_id: str, tokens: int | None) -> None:
        """Notes that the state in the session's last page is that after `tokens` tokens. None: the blocks' states are
        at different positions."""
        if tokens is None:
            self._state_at.pop(session_id, None)
        else:
            self._state_at[session_id] = tokens

    # --- copies -------------------------------------------------------------------------------------------------------

    def protect(self, pages: Sequence[int], tokens: int) -> None:
        """Keeps pages while they are copied: each gets one reference more, and its first `tokens` tokens must not be
        written. `unprotect` has to be called as often."""
        self.pool.hold(pages)
        self._protected.update(pages)
        read = self._read
        for page in pages:
            if read.get(page, 0) < tokens:
                read[page] = tokens

    def unprotect(self, page: int) -> None:
        self._protected[page] -= 1
        if not self._protected[page]:
            del self._protected[page], self._read[page]
            self._stranded.discard(page)
        self.pool.release([page], self._prefixes)

    def holders(self, page: int) -> int:
        """How many sessions hold the page."""
        return self.pool.references(page) - self._protected[page]

    @property
    def stranded(self) -> int:
        """How many pages are held by no session and will be free when their copies have ended."""
        return len(self._stranded)

    def own_pages(self, session_id: str, tenant: int) -> int:
        """How many of the session's pages count as its tenant's: all but public ones. Costs O(pages)."""
        return sum([self.pool.tenant(page) == tenant for page in self.pages_of(session_id)])

    def leaving_pages(self, tenant: int) -> int:
        """How many of the stranded pages count as the tenant's."""
        return sum([self.pool.tenant(page) == tenant for page in self._stranded])

    def is_end_read(self, session_id: str, computed: int) -> bool:
        """True if the page that holds the last part of the session's `computed` tokens is being copied. If the session
        is to write behind that part, it gets another page instead, and the old one counts as the tenant's until it is
        copied."""
        row = self._row.get(session_id)
        if row is None or not computed % self.page_size:
            return False
        return int(self._table[row, computed // self.page_size]) in self._protected

    @property
    def protected(self) -> list[int]:
        """The protected pages, each as often as it is protected."""
        return list(self._protected.elements())

    def last_key(self, session_id: str, pages: int) -> Key | None:
        """The key of the last of the session's first `pages` pages, which must be full and published; None if `pages`
        is 0."""
        return self._keys[session_id][pages - 1] if pages else None

    def keys_of(self, session_id: str, origin: Key, tokens: Sequence[int], computed: int) -> list[Key]:
        """The keys of all pages of a session that holds pages for exactly its `computed` tokens. The last page may be
        partly filled."""
        keys = self._keys.get(session_id, [])[: computed // self.page_size]
        for start in range(len(keys) * self.page_size, computed, self.page_size):
            keys.append(self._next_key(origin, keys, tokens, min(start + self.page_size, computed)))
        return keys

    def publish(self, session_id: str, tenant: int, tokens: Sequence[int], computed: int, salt: bytes = b"") -> None:
        """Notes that the KV of the session's first `computed` tokens is there. Sessions with the same prefix can now
        find its full pages."""
        row, keys = self._row[session_id], self._keys[session_id]
        for page in range(len(keys), computed // self.page_size):
            keys.append(self._next_key(root(tenant, salt), keys, tokens, (page + 1) * self.page_size))
            self._know(keys[page], int(self._table[row, page]))

    def adopt(
        self, session_id: str, tenant: int, tokens: Sequence[int], computed: int, most: int, salt: bytes = b""
    ) -> int:
        """Shares with the session the pages with the KV that follows its `computed` tokens, up to `most` tokens, as far
        as sessions of its tenant have computed it. The session must hold pages for its `computed` tokens only. Returns
        how many tokens of KV it has then."""
        size, origin = self.page_size, root(tenant, salt)
        keys, found = self._keys.get(session_id, [])[: computed // size], list[int]()
        own = len(keys)
        names = self.public.last_keys(origin, keys[-1] if keys else None, tokens[: own * size], size)
        while (len(keys) + 1) * size <= most:
            names = self.public.next_keys(origin, names, tokens[len(keys) * size : (len(keys) + 1) * size])
            known = ((key, self._prefixes.find(key)) for key in names)
            key, page = next(((key, page) for key, page in known if page is not None), (b"", None))
            if page is None:
                break
            keys.append(key)
            found.append(page)
        if len(keys) * size <= computed:
            return computed
        self.trim(session_id, own * size)
        self._share(found, tenant)
        self._stranded.difference_update(found)
        self._append(session_id, found)
        self._keys[session_id] = keys
        return len(keys) * size

    def _next_key(self, origin: Key, keys: Sequence[Key], tokens: Sequence[int], end: int) -> Key:
        """The key of the page that comes after the pages with `keys` and ends at token `end`."""
        return self.public.next_key(origin, keys[-1] if keys else None, tokens[len(keys) * self.page_size : end])

    def fork(
        self, parent: str, child: str, tenant: int, tokens: int, *, may_copy: bool = True, runs_last_again: bool = False
    ) -> tuple[int, PageCopy | None]:
        """Gives the child, which holds no pages, the KV of the parent's first `tokens` tokens. Returns how many of
        these the child has KV of, and the copy to make, if there is one.

        Full pages are shared. A partly filled page is copied to a new one, unless no page is free or `may_copy` is
        False. `runs_last_again`: both sessions will write the last token again, so its page is not shared.
        """
        assert child not in self._row
        pages = self.pages_of(parent)[: self.pages_for(tokens)]
        assert len(pages) == self.pages_for(tokens), f"{parent} holds {len(pages)} pages at {tokens} tokens"
        full = max(tokens - runs_last_again, 0) // self.page_size
        own, copy = pages[:full], None
        self._share(own, tenant)
        may_copy = may_copy and self.has_state(parent, tokens)
        if full < len(pages) and may_copy and self.pool.free:
            copy = PageCopy(pages[full], *self.pool.allocate(1, tenant, overwritten=True))
            self._prefixes.forget([copy.target])
            own.append(copy.target)
        if own:
            self.set_state(child, tokens)
            self._append(child, own)
            self._keys[child] = self._keys[parent][: min(tokens, len(own) * self.page_size) // self.page_size]
        return min(tokens, len(own) * self.page_size), copy

    def trim(self, session_id: str, tokens: int) -> int:
        """Takes the pages after the first `tokens` tokens from the session, because it will write from there on.
        Returns how many of these tokens it still has pages for.

        A page of which only a part would be kept is taken too, if another session holds it, if it is public, or if the
        part to be written is being copied. In a hybrid model, that part includes the page's state, and the page is also
        taken unless `has_state`.
        """
        row = self._row.get(session_id)
        if row is None:
            return 0
        if not self.has_state(session_id, tokens):
            tokens -= tokens % self.page_size
        held, kept = self._held[row], self.pages_for(tokens)
        if kept <= held and tokens % self.page_size:
            last = int(self._table[row, kept - 1])
            is_others = self.holders(last) > 1 or self.pool.is_public(last)
            read = self._read.get(last, 0)
            if is_others or tokens % self.page_size < read or (self.keeps_states and read):
                kept -= 1
            else:
                self._prefixes.forget([last])
        del self._keys[session_id][tokens // self.page_size :]
        if kept < held:
            self._cut(session_id, row, kept)
        return min(tokens, kept * self.page_size, held * self.page_size)

    def _know(self, key: Key, page: int) -> None:
        self._prefixes.add(key, page)
        if key in self.public:
            self.pool.make_public(page)

    def _append(self, session_id: str, pages: Sequence[int]) -> None:
        if session_id not in self._row:
            self._row[session_id] = self._take_row()
            self._keys[session_id] = []
        row = self._row[session_id]
        held = self._held[row]
        self._table[row, held : held + len(pages)] = pages
        self._held[row] = held + len(pages)

    def _share(self, pages: Sequence[int], tenant: int) -> None:
        self.changes += 1
        self.pool.share(pages, tenant)

    def _cut(self, session_id: str, row: int, kept: int) -> None:
        self.changes += 1
        held = self._held[row]
        pages = self._pages(row)[kept:].tolist()
        self.pool.release(pages, self._prefixes)
        self._stranded.update(page for page in self._protected.keys() & pages if self.holders(page) == 0)
        self._table[row, kept:held] = SCRATCH
        self._held[row] = kept
        if kept == 0:
            self._free_rows.append(self._row.pop(session_id))
            del self._keys[session_id]
            self._state_at.pop(session_id, None)

    def drop(self, session_id: str) -> None:
        """Takes all pages from the session. No effect if it holds none."""
        self.trim(session_id, 0)

    def page_table(self, session_ids: Sequence[str]) -> npt.NDArray[np.int32]:
        """int32 [sessions, width], a copy: each session's pages in the order of its tokens, padded with the scratch
        page. `width` is the largest number of pages held. Each session must hold pages."""
        rows = [self._row[session_id] for session_id in session_ids]
        width = max((self._held[row] for row in rows), default=0)
        return self._table[rows, :width]

    def resize(self, num_pages: int) -> dict[int, int]:
        """Changes the number of pages: see PagePool.resize. The tables have the new page numbers when this returns, and
        the caller moves the bytes. No page may be protected."""
        assert not self._protected, f"pages {sorted(self._protected)} are moving"
        self.changes += 1
        places = self.pool.resize(num_pages)
        self._prefixes.move(places)
        renamed = np.full(max(places, default=0) + 1, SCRATCH, np.int32)
        renamed[list(places)] = list(places.values())
        width = min(self._width, self._table.shape[1])
        table = np.full((len(self._table), self._width), SCRATCH, np.int32)
        table[:, :width] = renamed[self._table[:, :width]]
        self._table = table
        return places

    def check_integrity(self) -> None:
        """Asserts that tables and pool agree. Costs O(pages + rows)."""
        self.pool.check_integrity()
        self._prefixes.check_integrity()
        assert self._keys.keys() == self._row.keys(), "sessions with keys and sessions with pages differ"
        rows = sorted([*self._row.values(), *self._free_rows])
        assert rows == list(range(len(self._table))), f"{len(rows)} rows are in use or free, of {len(self._table)}"
        for session_id, row in self._row.items():
            pages = self._pages(row).tolist()
            assert pages and SCRATCH not in pages, f"session {session_id} holds {pages}"
            assert len(set(pages)) == len(pages), f"session {session_id} holds a page twice: {pages}"
        entries = sum(self._held[row] for row in self._row.values())
        in_tables = np.bincount(self._table.ravel(), minlength=self.pool.capacity + 1)
        moving = self._protected
        assert moving.keys() == self._read.keys(), "pages that move and pages that are read differ"
        stranded = {page for page in moving if self.holders(page) == 0}
        assert stranded == self._stranded, f"pages {sorted(stranded ^ self._stranded)}: stranded or not?"
        assert entries == self._table.size - in_tables[SCRATCH], "a row has pages past those that it counts"
        for page, in_rows in enumerate(in_tables[1:].tolist(), 1):
            holders, references = in_rows + moving.get(page, 0), self.pool.references(page)
            assert holders == references, f"page {page} is held {holders} times and has {references} references"

    def may_write(self, page: int) -> bool:
        """True if no other session holds the page or could find it."""
        return self.holders(page) == 1 and page not in self._prefixes

    def _pages(self, row: int) -> npt.NDArray[np.int32]:
        """A view of the row's pages."""
        return self._table[row, : self._held[row]]

    def _take_row(self) -> int:
        if not self._free_rows:
            rows, width = self._table.shape
            grown = np.full((2 * rows, width), SCRATCH, np.int32)
            grown[:rows] = self._table
            self._table = grown
            self._held += [0] * rows
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()
