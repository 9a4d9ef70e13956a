"""The public prefixes: tokens that an administrator has marked, so that all users' sessions share their pages.

The journal has them, and each engine that gets their model is told of them. An engine makes keys of pages by what it
has been told, so a prefix that is withdrawn stays public there until the model is loaded anew. Those of a model that a
client shares are not in the journal, and go with it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from djinn_client.errors import NotFound, NotPermitted
from djinn_client.protocol import PrefixInfo
from djinnd.config import Limits
from djinnd.server.journal import Journal
from djinnd.server.journal_changes import Published

log = logging.getLogger("djinnd.server")


@dataclass(frozen=True, slots=True)
class Prefix:
    """`tokens`: full pages. `user`: who has marked it. `created`: seconds since 1970. `shared`: the model is one that a
    client shares."""

    id: str
    model: str
    user: int
    created: float
    tokens: list[int]
    shared: bool = False

    @property
    def info(self) -> PrefixInfo:
        return PrefixInfo(id=self.id, model=self.model, tokens=len(self.tokens), user=self.user, created=self.created)


class PrefixTable:
    def __init__(self, limits: Limits, journal: Journal) -> None:
        self.limits = limits
        self._journal = journal
        self._prefixes: dict[str, Prefix] = {}

    def __iter__(self) -> Iterator[Prefix]:
        """In the order in which they were marked."""
        return iter(list(self._prefixes.values()))

    def restore(self, kept: Iterable[Published]) -> None:
        """At start: what the journal has."""
        for was in kept:
            self._prefixes[was.prefix] = Prefix(was.prefix, was.model, was.user, was.created, was.tokens)

    def of_model(self, model: str, shared: bool) -> list[Prefix]:
        """`shared`: the client's model of that name, and not one that the daemon has had before."""
        return [prefix for prefix in self if (prefix.model, prefix.shared) == (model, shared)]

    def publish(self, model: str, user: int, tokens: list[int], shared: bool) -> Prefix:
        """Where these very tokens are public already, that prefix. Raises NotPermitted where the model has as many as
        it may have."""
        own = self.of_model(model, shared)
        for prefix in own:
            if prefix.tokens == tokens:
                return prefix
        if len(own) >= self.limits.public_prefixes_per_model:
            raise NotPermitted(
                f"{model} has {len(own):,} public prefixes, the limit of one model: withdraw some",
                prefixes=len(own),
            )
        prefix = Prefix(secrets.token_hex(8), model, user, time.time(), tokens, shared)
        self._prefixes[prefix.id] = prefix
        if not shared:
            self._journal.published(Published(prefix.id, model, user, prefix.created, tokens))
        log.info("prefix_published prefix=%s model=%s user=%d tokens=%d", prefix.id, model, user, len(tokens))
        return prefix

    def withdraw(self, prefix_id: str) -> Prefix:
        """Raises NotFound."""
        prefix = self._prefixes.pop(prefix_id, None)
        if prefix is None:
            raise NotFound(
                f"there is no public prefix {prefix_id[:64]!r}: `djinnctl prefix list` has their ids",
                prefix=prefix_id[:64],
            )
        if not prefix.shared:
            self._journal.withdrawn(prefix.id)
        log.info("prefix_withdrawn prefix=%s model=%s", prefix.id, prefix.model)
        return prefix

    def forget_shared(self, model: str) -> None:
        """The client's model is gone."""
        for prefix in self.of_model(model, shared=True):
            del self._prefixes[prefix.id]
