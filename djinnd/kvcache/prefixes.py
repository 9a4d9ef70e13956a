"""Finds the pages that hold the KV of a prefix, so that equal prefixes of a tenant are computed and stored once.

The key of a full page is a hash of everything that determines its KV: the tenant, and every token up to the page's end.
For imported KV, a random salt is part of it.

    root(tenant, salt) ──tokens of page 0──► key 0 ──tokens of page 1──► key 1 ──► …   each by BLAKE2b of the one before

So a tenant finds only its own pages, in the order of the tokens, up to the first page that is not there. A page can be
found after its last holder has dropped it, until it is given away or written into.

A prefix that an administrator has marked as public begins at a root that all tenants share. Where a session leaves the
prefix, its tenant's root comes in, so that later pages are not shared:

    PUBLIC ──page 0──► key 0 ──page 1──► key 1 ──root(tenant), page 2──► key 2 ──► …

A page keeps the key under which it was published. If a prefix was marked later, the same KV may have several keys, and
a search tries them all.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from secrets import token_bytes

Key = bytes
KEY_BYTES = 16

PUBLIC = blake2b(b"public", digest_size=KEY_BYTES).digest()


def root(tenant: int, salt: bytes = b"") -> Key:
    """The key at which a tenant's keys begin. With a salt it is one byte longer than other keys; pages behind it are
    never public."""
    digest = blake2b(tenant.to_bytes(8, "little") + salt, digest_size=KEY_BYTES).digest()
    return digest + b"\1" if salt else digest


def chain(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a page with these tokens, which comes after the page with the key `parent`. In place of a token there
    may be a position's name (core/names.py): 64 bits, with negative upper 32 bits, which no token has."""
    try:
        numbers = array("i", tokens)
    except OverflowError:
        numbers = array("q", tokens)
    return blake2b(parent + numbers.tobytes(), digest_size=KEY_BYTES).digest()


def unshared_keys(count: int) -> list[Key]:
    """Random keys for `count` pages, which no other session can find: their KV depends on more than tokens."""
    return [token_bytes(KEY_BYTES) for _ in range(count)]


class PublicPrefixes:
    """The public prefixes of one model. A prefix that is marked stays public for as long as this object lives, because
    keys depend on it."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self._ends: set[Key] = set()  # the last key of each prefix

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def mark(self, tokens: Sequence[int], page_size: int) -> None:
        """Makes the full pages of these tokens public."""
        key = PUBLIC
        for start in range(0, len(tokens) - page_size + 1, page_size):
            key = chain(key, tokens[start : start + page_size])
            self._keys.add(key)
        if key != PUBLIC:
            self._ends.add(key)

    def next_key(self, origin: Key, parent: Key | None, tokens: Sequence[int]) -> Key:
        """The key under which a page with `tokens` is published, in a session that begins at `origin`. `parent` is the
        key of the page before; None for the first page."""
        return self.next_keys(origin, () if parent is None else (parent,), tokens)[0]

    def next_keys(self, origin: Key, parents: Sequence[Key], tokens: Sequence[int]) -> list[Key]:
        """All keys under which such a page may be published, beginning with that of `next_key`. `parents`: all keys of
        the page before."""
        keys = []
        for parent in parents or ([PUBLIC, origin] if len(origin) == KEY_BYTES else [origin]):
            key = chain(parent, tokens)
            if parent != PUBLIC and parent not in self._keys:
                keys.append(key)
                continue
            if key in self._keys:
                keys.append(key)
            if parent in self._ends or (parent != PUBLIC and key not in self._keys):
                keys.append(chain(blake2b(parent + origin, digest_size=KEY_BYTES).digest(), tokens))
        return keys

    def last_keys(self, origin: Key, last: Key | None, tokens: Sequence[int], page_size: int) -> list[Key]:
        """All keys, as of `next_keys`, of the last page of these tokens, which has the key `last`."""
        if last not in self._keys:
            return [] if last is None else [last]
        keys: list[Key] = []
        for start in range(0, len(tokens), page_size):
            keys = self.next_keys(origin, keys, tokens[start : start + page_size])
        return keys


class PrefixIndex:
    """Keys and pages of one pool. Each key has one page, and each page one key."""

    def __init__(self) -> None:
        self._page: dict[Key, int] = {}
        self._key: dict[int, Key] = {}

    def __contains__(self, page: object) -> bool:
        return page in self._key

    def find(self, key: Key) -> int | None:
        return self._page.get(key)

    def add(self, key: Key, page: int) -> None:
        """Publishes a page. If another page has the key, that one stays."""
        if key not in self._page and page not in self._key:
            self._page[key] = page
            self._key[page] = key

    def forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            key = self._key.pop(page, None)
            if key is not None:
                del self._page[key]

    def move(self, places: Mapping[int, int]) -> None:
        """Renumbers pages after the pool was resized; pages without a new number are forgotten."""
        self._key = {places[page]: key for page, key in self._key.items() if page in places}
        self._page = {key: page for page, key in self._key.items()}

    def check_integrity(self) -> None:
        assert self._page == {key: page for page, key in self._key.items()}, "keys and pages of prefixes disagree"
