"""Which pages hold the KV of which prefix, so that equal prefixes of a tenant are computed and held once.

A full page is known by a key that says all that its KV follows from: the tenant, and every token up to the page's end;
and, where a client has given KV of its own, a salt that nobody else has.

    root(tenant, salt) ──tokens of page 0──► key 0 ──tokens of page 1──► key 1 ──► …   each by BLAKE2b of the one before

So a tenant that asks finds its own pages only, and finds them in the order of the tokens, up to the first that nobody
has computed. A page stays known when its last holder has dropped it, until it is given to somebody, or written into.

A prefix that an administrator has marked as public begins at a root that all tenants have in common. Where a session
leaves it, the tenant's root comes in, so that nothing behind it is shared:

    PUBLIC ──page 0──► key 0 ──page 1──► key 1 ──root(tenant), page 2──► key 2 ──► …

A page keeps the key by which it was made known. So where a prefix was marked after that, one page may be known by
several keys, and whoever looks for it tries them all.
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
    """With a salt it is a byte longer than a key: what begins there is never public."""
    digest = blake2b(tenant.to_bytes(8, "little") + salt, digest_size=KEY_BYTES).digest()
    return digest + b"\1" if salt else digest


def chain(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of the page that holds `tokens`, all of it, after the page of `parent`. In the place of a token there may
    be a position's name (core/names.py): 64 bits, and negative in the upper 32, which no token is."""
    try:
        numbers = array("i", tokens)
    except OverflowError:
        numbers = array("q", tokens)
    return blake2b(parent + numbers.tobytes(), digest_size=KEY_BYTES).digest()


def unshared_keys(count: int) -> list[Key]:
    """Keys of so many pages whose KV follows from more than tokens: only who is told finds them."""
    return [token_bytes(KEY_BYTES) for _ in range(count)]


class PublicPrefixes:
    """Of one model. What has been marked stays so for as long as this lives: keys have been made by it."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self._ends: set[Key] = set()  # of these, the last one of each prefix

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def mark(self, tokens: Sequence[int], page_size: int) -> None:
        """The full pages of these tokens."""
        key = PUBLIC
        for start in range(0, len(tokens) - page_size + 1, page_size):
            key = chain(key, tokens[start : start + page_size])
            self._keys.add(key)
        if key != PUBLIC:
            self._ends.add(key)

    def next_key(self, origin: Key, parent: Key | None, tokens: Sequence[int]) -> Key:
        """By which the page that holds `tokens` is made known, in a session that begins at `origin`, after the page of
        `parent`, if it is not the first."""
        return self.next_keys(origin, () if parent is None else (parent,), tokens)[0]

    def next_keys(self, origin: Key, parents: Sequence[Key], tokens: Sequence[int]) -> list[Key]:
        """By which such a page may be known already, the one of `next_key` first. `parents`: the same of the page
        before."""
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
        """All keys, as of `next_keys`, of the page that has the key `last` and is the last of these tokens'."""
        if last not in self._keys:
            return [] if last is None else [last]
        keys: list[Key] = []
        for start in range(0, len(tokens), page_size):
            keys = self.next_keys(origin, keys, tokens[start : start + page_size])
        return keys


class Prefixes:
    """Of one pool. Each key has one page and each page one key."""

    def __init__(self) -> None:
        self._page: dict[Key, int] = {}
        self._key: dict[int, Key] = {}

    def __contains__(self, page: object) -> bool:
        return page in self._key

    def find(self, key: Key) -> int | None:
        return self._page.get(key)

    def add(self, key: Key, page: int) -> None:
        """Of two pages that hold the same, the first is the one that is found."""
        if key not in self._page and page not in self._key:
            self._page[key] = page
            self._key[page] = key

    def forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            key = self._key.pop(page, None)
            if key is not None:
                del self._page[key]

    def move(self, places: Mapping[int, int]) -> None:
        """The pool has another size: of each page that is still what it was, where it is now."""
        self._key = {places[page]: key for page, key in self._key.items() if page in places}
        self._page = {key: page for page, key in self._key.items()}

    def check_integrity(self) -> None:
        assert self._page == {key: page for page, key in self._key.items()}, "keys and pages of prefixes disagree"
