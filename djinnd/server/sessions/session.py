"""One session: its tokens, edits and breakpoints. The server owns them; engines have copies.

The journal stores each change: see journal.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from djinn_client.errors import ModelNotFound, SessionBusy, SessionLost
from djinn_client.protocol import Class
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinnd.core.edits import FOREVER, Edit, now
from djinnd.server.journal.changes import Change
from djinnd.server.journal.journal import Journal
from djinnd.server.journal.tables.breakpoints import BreakpointsEnded, BreakpointSet, Stopped
from djinnd.server.journal.tables.edits import Edited, EditsCut, EditsEnded
from djinnd.server.probe_lists.breakpoint_list import BreakpointList, SessionBreakpoint
from djinnd.server.probe_lists.edit_list import PART_BYTES, EditList, nbytes_of
from djinnd.server.quotas.latency import SessionLatency
from djinnd.server.quotas.ledger import JOURNAL_BYTES
from djinnd.server.quotas.quotas import Tenant
from djinnd.server.sessions.conversations import ConversationState
from djinnd.server.sessions.session_adapter import SessionAdapter
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.client import ConnectedClient

# Bytes that a session is charged in the journal, without its edits.
SESSION_BYTES = 512
TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class SessionRecord:
    """State of one session. Times are CLOCK_MONOTONIC.

    - `tokens`: the tokens of all prompts and all generated tokens that stay. After appending, call `changed` before the
      tokens are sent to the client.
    - `shared`: a client shares the session's model.
    - `salt`: not empty if some of its KV came from a client. Such a session is not in the journal.
    - `adapter`: it stays the same for the session's life.
    - `kept`: set if the daemon keeps it for a program that does not know sessions; see conversations.py.
    - `is_paused`: survives the loss of an engine, and ends with the daemon.
    - `woken_at`: when its client last announced a call; 0 if the client has announced a wait since.
    """

    id: str
    user: int
    model: str
    priority: Class
    created: float
    used: float
    journal: Journal
    latency: SessionLatency
    tenant: Tenant  # of `user`
    shared: bool = False
    salt: bytes = b""
    adapter: SessionAdapter | None = None
    kept: ConversationState | None = None
    is_lost: bool = False  # its engine died with KV of a client, which cannot be computed again
    is_restored: bool = False  # from the journal and not used yet: the checkpoint may have changed
    is_paused: bool = False
    is_orphan: bool = False  # its shared model went with an earlier daemon; a model of that name is another one
    tokens: list[int] = field(default_factory=list)
    journalled: int = 0  # number of tokens that the journal has; see Journalled
    edits: EditList = field(default_factory=EditList)
    part_bytes: int = 0  # bytes of its edits and breakpoints in the journal
    charged: int = 0  # journal bytes that are charged to the tenant's ledger
    is_closed: bool = False
    breakpoints: BreakpointList = field(default_factory=BreakpointList)
    due_from: int = FOREVER  # the next call computes from here on at the latest; see core.Session
    woken_at: float = 0.0
    attached: set[ConnectedClient] = field(default_factory=set)
    call: ClientCall | None = None  # the call that uses the session
    grace: asyncio.TimerHandle | None = None  # runs while no client is attached

    @contextmanager
    def in_use(self, call: ClientCall) -> Iterator[None]:
        """Reserves the session for one call. Raises SessionBusy."""
        self.expect_idle()
        self.call = call
        try:
            yield
        finally:
            self.call = None
            self.used = time.monotonic()
            self.charge_journal()

    def called(self, received: float) -> None:
        """Starts the latency measurement of a call that was received at `received` and is about to run."""
        self.latency.called(received, self.woken_at if self.woken_at > self.used else received)

    def changed(self) -> None:
        """Notifies the journal that tokens were appended. Does nothing if the journal has them all."""
        if not self.salt and len(self.tokens) > self.journalled:
            self.journal.changed(self)

    @property
    def journal_bytes(self) -> int:
        """Bytes that the session takes in the journal."""
        if self.salt:
            return 0
        return SESSION_BYTES + TOKEN_BYTES * len(self.tokens) + self.part_bytes

    def charge_journal(self) -> None:
        """Charges the tenant for the session's present size in the journal. The caller has checked that there is room.
        A call's tokens are charged when the call ends, so that a step of many sessions takes no longer."""
        if self.is_closed:
            return
        grown = self.journal_bytes - self.charged
        self.charged += grown
        if grown > 0:
            self.tenant.ledger.add(JOURNAL_BYTES, grown)
        elif grown < 0:
            self.tenant.ledger.release(JOURNAL_BYTES, -grown)
            self.journal.freed(-grown)

    @property
    def fixed(self) -> int:
        """Number of first tokens that cannot be edited: their KV may have come from a client, and cannot be computed
        again. KV behind a breakpoint's hit was computed here."""
        if not self.salt:
            return 0
        last, hit = now(len(self.tokens)), self.breakpoints.hit
        return last if hit is None else min(last, hit.first)

    def add_edit(self, edit: Edit, names: Sequence[str]) -> None:
        self.edits.add(edit, names)
        self.recount()
        self.due_from = min(self.due_from, edit.first)
        self._note_edit(edit, names)

    def inherit(self, parent: SessionRecord) -> None:
        """Copies the parent's edits and breakpoints to this session, a new fork."""
        self.edits, self.breakpoints, self.due_from = parent.edits.copy(), parent.breakpoints.copy(), parent.due_from
        self.recount()
        for edit in self.edits.edits:
            self._note_edit(edit, self.edits.names[edit.number])
        for breakpoint in self.breakpoints.breakpoints:
            self._note(BreakpointSet(self.id, breakpoint), PART_BYTES * breakpoint.count)

    def end_edits(self, numbers: Collection[int], at: int) -> None:
        self.edits.end(numbers, at)
        self.recount()
        self.due_from = min(self.due_from, at)
        self._note(EditsEnded(self.id, list(numbers), at))

    def recount(self) -> None:
        """Updates the size in the journal after edits or breakpoints have changed."""
        self.part_bytes = self.edits.nbytes + PART_BYTES * self.breakpoints.count
        self.charge_journal()

    def add_breakpoint(self, breakpoint: SessionBreakpoint) -> None:
        self.breakpoints.add(breakpoint)
        self.recount()
        self._note(BreakpointSet(self.id, breakpoint), PART_BYTES * breakpoint.count)

    def end_breakpoints(self, numbers: Collection[int]) -> None:
        self.breakpoints.end(numbers)
        self.recount()
        self._note(BreakpointsEnded(self.id, list(numbers)))

    def stopped(self, hit: HitInfo | None) -> None:
        """Records where the last call stopped at a breakpoint; None if the session is at no breakpoint."""
        self.breakpoints.hit = hit
        if hit is not None:
            self.due_from = hit.first
        self._note(Stopped(self.id, hit))

    def cut(self, length: int) -> None:
        if length < len(self.tokens) and self.breakpoints.hit is not None:
            self.stopped(None)
        del self.tokens[length:]
        if self.edits.cut(length):
            self.recount()
            self._note(EditsCut(self.id, length))
        if length < self.journalled:
            self.journalled = length
            self.journal.changed(self)
        self.charge_journal()

    def _note_edit(self, edit: Edit, names: Sequence[str]) -> None:
        self._note(Edited(self.id, edit, names), nbytes_of(edit, names))

    def _note(self, change: Change, nbytes: int = 0) -> None:
        """Passes a change to the journal, unless the session is not in it."""
        if not self.salt:
            self.journal.note(change, nbytes)

    def expect_idle(self) -> None:
        if self.call is not None:
            raise SessionBusy(f"session {self.id} is busy with another call: wait for it, or open a second session")

    @property
    def is_free(self) -> bool:
        """True if a conversation may continue on this session."""
        return self.call is None and self.is_servable and not self.is_paused

    @property
    def is_plain(self) -> bool:
        """True if its output follows from its tokens, its model and its adapter alone."""
        return not (self.edits.edits or self.breakpoints.breakpoints or self.salt)

    @property
    def served_name(self) -> str:
        """Its model, with its adapter if it has one, as calls without a session name it."""
        return self.model if self.adapter is None else f"{self.model}:{self.adapter.name}"

    @property
    def is_servable(self) -> bool:
        """False if no engine can serve it any more."""
        return not (self.is_orphan or self.is_lost)

    def expect_model(self) -> None:
        """Raises ModelNotFound or SessionLost if the session is not servable."""
        if self.is_lost:
            raise SessionLost(
                f"session {self.id} had KV from a client, which was lost with the engine: read its tokens, and hand "
                "the KV over again, or continue with the tokens in a new session",
                session=self.id,
            )
        if self.is_orphan:
            raise ModelNotFound(
                f"{self.model} was shared by a client and was lost with an earlier djinnd: read this session's tokens, "
                "and continue with them in a new session",
                model=self.model,
            )
