"""The public prefixes: tokens that an administrator has published, so that sessions of all users share their pages.

The journal stores them, and each engine that has their model is told of them. An engine uses them when it makes keys of
pages. So a withdrawn prefix stays public in an engine until the model is loaded again. Prefixes of a model that a
client shares are not in the journal, and are forgotten with the model.
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
from djinnd.server.journal.journal import Journal
from djinnd.server.journal.tables.prefixes import Published, Withdrawn

log = logging.getLogger("djinnd.server")


@dataclass(frozen=True, slots=True)
class Prefix:
    """One public prefix. `tokens`: full pages. `user` has published it. `created`: seconds since 1970. `shared`: a
    client shares the model."""

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
    """All public prefixes."""

    def __init__(self, limits: Limits, journal: Journal) -> None:
        self.limits = limits
        self._journal = journal
        self._prefixes: dict[str, Prefix] = {}

    def __iter__(self) -> Iterator[Prefix]:
        """Iterates in the order of publication."""
        return iter(list(self._prefixes.values()))

    def restore(self, kept: Iterable[Published]) -> None:
        """Restores the journal's prefixes, at startup."""
        for was in kept:
            self._prefixes[was.prefix] = Prefix(was.prefix, was.model, was.user, was.created, was.tokens)

    def of_model(self, model: str, shared: bool) -> list[Prefix]:
        """The prefixes of a model. `shared`: of the model that a client shares, and not of the daemon's own of that
        name."""
        return [prefix for prefix in self if (prefix.model, prefix.shared) == (model, shared)]

    def publish(self, model: str, user: int, tokens: list[int], shared: bool) -> Prefix:
        """Publishes a prefix. If the same tokens are public already, returns that prefix. Raises NotPermitted at the
        limit of the model."""
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
            self._journal.note(Published(prefix.id, model, user, prefix.created, tokens))
        log.info("prefix_published prefix=%s model=%s user=%d tokens=%d", prefix.id, model, user, len(tokens))
        return prefix

    def withdraw(self, prefix_id: str) -> Prefix:
        """Removes a prefix. Raises NotFound."""
        prefix = self._prefixes.pop(prefix_id, None)
        if prefix is None:
            raise NotFound(
                f"there is no public prefix {prefix_id[:64]!r}: `djinnctl prefix list` has their ids",
                prefix=prefix_id[:64],
            )
        if not prefix.shared:
            self._journal.note(Withdrawn(prefix.id))
        log.info("prefix_withdrawn prefix=%s model=%s", prefix.id, prefix.model)
        return prefix

    def forget_shared(self, model: str) -> None:
        """Removes the prefixes of a model that a client shared, after it has gone."""
        for prefix in self.of_model(model, shared=True):
            del self._prefixes[prefix.id]
