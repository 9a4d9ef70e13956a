"""Records: named points of conversations, with bytes of the caller's that the daemon does not read.

A record holds the tokens that its session had, so that a call can continue from it after the session has changed or was
closed. It is in the journal and charged to its user. Beyond a limit a new record replaces the user's oldest ones,
because programs that keep a record for every answer never remove one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable

from djinn_client import protocol
from djinn_client.errors import InvalidRequest, NotFound
from djinn_client.protocol.fields.bounds import pack, unpack
from djinnd.config import Limits
from djinnd.server.journal.journal import Journal
from djinnd.server.journal.tables.records import Recorded, Unrecorded
from djinnd.server.quotas.ledger import JOURNAL_BYTES, Ledger
from djinnd.server.sessions.session import SessionRecord
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.wire.call import ClientCall
from djinnd.server.wire.request_handler import handles

log = logging.getLogger("djinnd.server")

RECORD_BYTES = 512  # in the journal, beside tokens and body
_SWEEP = 600.0  # seconds, at most, that a record is there beyond its time


class RecordTable:
    """`limits` may be replaced."""

    def __init__(self, limits: Limits, sessions: SessionTable, journal: Journal) -> None:
        self.limits = limits
        self._sessions = sessions
        self._journal = journal
        self._of: dict[int, dict[str, Recorded]] = {}  # by user and name; a user's oldest first
        self._sweep: asyncio.TimerHandle | None = None

    def restore(self, kept: Iterable[Recorded]) -> None:
        """Takes the journal's records at start, the oldest first."""
        for record in kept:
            self._of.setdefault(record.user, {})[record.record] = record
            self._ledger(record.user).add(JOURNAL_BYTES, _nbytes(record))
        self._drop_expired()

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()

    def find(self, user: int, name: str) -> Recorded:
        """Raises NotFound; the answer is the same for unknown records and other users'."""
        record = self._of.get(user, {}).get(name)
        if record is None:
            raise NotFound(f"there is no record {name[:64]!r}: it was dropped, has expired, or never was", record=name)
        return record

    def of_model(self, user: int, name: str, model: str) -> Recorded:
        """Finds the record from which a call of this model continues. Raises NotFound, InvalidRequest."""
        record = self.find(user, name)
        if record.model != model:
            raise InvalidRequest(f"record {name} is of {record.model}, and not of {model}", field="conversation.after")
        return record

    # --- requests ---------------------------------------------------------------------------------------------------

    @handles(protocol.KeepRecord, is_new_work=True, journal="changes")
    async def keep(self, call: ClientCall, request: protocol.KeepRecord) -> protocol.RecordKept:
        user, model, tokens = call.client.user, request.model, b""
        if request.session:
            session = self._sessions.lookup(request.session, call.client)
            session.expect_idle()
            self._expect_plain(session)
            user, model, tokens = session.user, session.served_name, pack(session.tokens)
        elif not model:
            raise InvalidRequest("a record needs a session, or a model", field="session")
        if len(request.body) > self.limits.record_bytes:
            told = f"a record's body has {len(request.body):,} bytes, and limits.record_bytes is"
            raise InvalidRequest(f"{told} {self.limits.record_bytes:,}: keep less with it", field="body")
        name = request.record or secrets.token_hex(8)
        record = Recorded(user, name, model, request.session, time.time(), tokens, request.body)
        self._make_room(record)
        self._of.setdefault(record.user, {})[name] = record
        self._ledger(user).add(JOURNAL_BYTES, _nbytes(record))
        self._journal.note(record, len(tokens) + len(request.body))
        return protocol.RecordKept(id=call.id, record=name)

    @handles(protocol.GetRecord)
    async def get(self, call: ClientCall, request: protocol.GetRecord) -> protocol.Record:
        found = self.find(call.client.user, request.record)
        return protocol.Record(
            id=call.id,
            record=found.record,
            model=found.model,
            session=found.origin,
            length=_length(found),
            created=found.created,
            body=found.body,
        )

    @handles(protocol.DropRecord, journal="changes")
    async def drop(self, call: ClientCall, request: protocol.DropRecord) -> None:
        self._drop(self.find(call.client.user, request.record))

    @handles(protocol.ListRecords)
    async def list_records(self, call: ClientCall, request: protocol.ListRecords) -> protocol.Records:
        return protocol.Records(id=call.id, records=[_info(record) for record in self._own(call.client.user)])

    # --- room -------------------------------------------------------------------------------------------------------

    def _expect_plain(self, session: SessionRecord) -> None:
        """Checks that the session's output follows from its tokens. Raises InvalidRequest."""
        if not session.is_plain:
            raise InvalidRequest(
                f"session {session.id} has edits, breakpoints or KV of a client, which a record does not keep: fork it",
                field="session",
            )

    def _make_room(self, record: Recorded) -> None:
        """Drops a record of the same name, then closes idle kept sessions, then drops the user's oldest records. Raises
        QuotaExceeded, and drops nothing, if all of that would not be enough."""
        nbytes, ledger = _nbytes(record), self._ledger(record.user)
        self._sessions.expect_disk(self._sessions.tenant(record.user), nbytes)
        freed = self._sessions.idle_bytes(record.user) + sum(map(_nbytes, self._own(record.user)))
        if not ledger.has_room(JOURNAL_BYTES, nbytes - freed):
            ledger.expect_room(JOURNAL_BYTES, nbytes)
        if (was := self._of.get(record.user, {}).get(record.record)) is not None:
            self._drop(was)
        for oldest in self._own(record.user):
            self._sessions.make_room(record.user, nbytes)
            is_full = len(self._of.get(record.user, ())) >= self.limits.records_per_user
            if not is_full and ledger.has_room(JOURNAL_BYTES, nbytes):
                break
            self._drop(oldest)
        self._sessions.make_room(record.user, nbytes)

    def _drop(self, record: Recorded) -> None:
        own = self._of[record.user]
        del own[record.record]
        if not own:
            del self._of[record.user]
        self._ledger(record.user).release(JOURNAL_BYTES, _nbytes(record))
        self._journal.freed(_nbytes(record))
        self._journal.note(Unrecorded(record.user, record.record))

    def _drop_expired(self) -> None:
        """Drops records older than limits.record_ttl (0: never), now and every _SWEEP seconds."""
        oldest = time.time() - self.limits.record_ttl
        if self.limits.record_ttl:
            for user in list(self._of):
                for record in self._own(user):
                    if record.created < oldest:
                        self._drop(record)
        self._sweep = asyncio.get_running_loop().call_later(_SWEEP, self._drop_expired)

    def _own(self, user: int) -> list[Recorded]:
        return list(self._of.get(user, {}).values())

    def _ledger(self, user: int) -> Ledger:
        return self._sessions.tenant(user).ledger


def tokens_of(record: Recorded) -> list[int]:
    return unpack(record.tokens)


def _length(record: Recorded) -> int:
    return len(record.tokens) // 4


def _nbytes(record: Recorded) -> int:
    """Bytes of a record in the journal."""
    return RECORD_BYTES + len(record.tokens) + len(record.body)


def _info(record: Recorded) -> protocol.RecordInfo:
    return protocol.RecordInfo(
        record=record.record,
        model=record.model,
        session=record.origin,
        length=_length(record),
        nbytes=len(record.body),
        created=record.created,
    )
