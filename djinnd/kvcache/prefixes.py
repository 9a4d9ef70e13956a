"""Which pages hold the KV of which prefix, so that equal prefixes of a tenant are computed and held once.

A full page is known by a key that says all that its KV follows from: the tenant, and every token up to the page's end.

    root(tenant) ──tokens of page 0──► key 0 ──tokens of page 1──► key 1 ──► …      each by BLAKE2b of the one before

So a tenant that asks finds its own pages only, and finds them in the order of the tokens, up to the first that nobody
has computed. A page stays known when its last holder has dropped it, until it is given to somebody, or written into.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

Key = bytes
KEY_BYTES = 16


def root(tenant: int) -> Key:
    return blake2b(tenant.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


def chain(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of the page that holds `tokens`, all of it, after the page of `parent`."""
    return blake2b(parent + array("i", tokens).tobytes(), digest_size=KEY_BYTES).digest()


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
