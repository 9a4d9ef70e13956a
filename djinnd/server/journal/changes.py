"""The changes of sessions that the journal's file holds, and the list of changes that are still to be folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from djinn_client.protocol import Class
from djinnd.server.journal.tables.adapters import AdapterChosen
from djinnd.server.journal.tables.breakpoints import BreakpointChange
from djinnd.server.journal.tables.conversations import ConversationKept
from djinnd.server.journal.tables.edits import EditChange
from djinnd.server.journal.tables.prefixes import Published, Withdrawn
from djinnd.server.journal.tables.records import Recorded, Unrecorded


class SessionAdded(msgspec.Struct, array_like=True, tag="opened", frozen=True):
    """`shared`: the model was a client's, and a later model of that name is another one. `created`: seconds since
    1970."""

    session: str
    user: int
    model: str
    shared: bool
    priority: Class
    created: float


class Extended(msgspec.Struct, array_like=True, tag="extended", frozen=True):
    """The session's tokens from `start` on are replaced by `tokens`. If these are empty, it was cut at `start`."""

    session: str
    start: int
    tokens: list[int]


class Reclassified(msgspec.Struct, array_like=True, tag="reclassified", frozen=True):
    """The session's scheduling class has changed."""

    session: str
    priority: Class


class Closed(msgspec.Struct, array_like=True, tag="closed", frozen=True):
    """The session was closed."""

    session: str


Change = (
    SessionAdded
    | Extended
    | Reclassified
    | ConversationKept
    | AdapterChosen
    | Closed
    | EditChange
    | BreakpointChange
    | Published
    | Withdrawn
    | Recorded
    | Unrecorded
)


@dataclass(slots=True)
class _At:
    """A change and its time."""

    at: float  # seconds since 1970
    change: Change


class Unfolded:
    """The changes since the last fold, merged where possible. Hundreds of steps in a row give each of many sessions a
    token. Folding those one by one would take longer than a step, and delay all sessions."""

    def __init__(self) -> None:
        self._changes: list[_At] = []
        self._growing: dict[str, tuple[_At, Extended]] = {}  # by session: the last changes, all of them Extended

    def add(self, at: float, changes: Sequence[Change]) -> None:
        for change in changes:
            if type(change) is not Extended:
                self._growing.clear()
                self._changes.append(_At(at, change))
            elif not self._grows(at, change):
                own = Extended(change.session, change.start, list(change.tokens))
                self._changes.append(_At(at, own))
                self._growing[change.session] = self._changes[-1], own

    def _grows(self, at: float, change: Extended) -> bool:
        """Merges the change into the session's last one. Returns False if that is not possible."""
        last = self._growing.get(change.session)
        if last is None:
            return False
        entry, before = last
        kept = change.start - before.start
        if not 0 <= kept <= len(before.tokens):
            return False
        before.tokens[kept:] = change.tokens
        entry.at = at
        return True

    def __iter__(self) -> Iterator[tuple[float, Change]]:
        return ((each.at, each.change) for each in self._changes)

    def __len__(self) -> int:
        return len(self._changes)

    def clear(self) -> None:
        self._changes.clear()
        self._growing.clear()
