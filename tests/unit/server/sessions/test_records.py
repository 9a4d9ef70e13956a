from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from djinn_client.errors import InvalidRequest, NotFound, QuotaExceeded, SessionBusy
from djinn_client.protocol import DropRecord, GetRecord, KeepRecord, ListRecords
from djinn_client.protocol.fields.bounds import pack
from djinnd.config import Limits
from djinnd.core.edits import Edit, Extent
from djinnd.server.journal.journal import Journal
from djinnd.server.journal.tables.records import Recorded
from djinnd.server.quotas.ledger import JOURNAL_BYTES
from djinnd.server.quotas.quotas import QuotaTable
from djinnd.server.sessions.records import RECORD_BYTES, RecordTable, tokens_of
from djinnd.server.sessions.session import SESSION_BYTES
from djinnd.server.sessions.sessions import SessionTable


@dataclass(eq=False)
class Client:
    user: int = 1
    is_admin: bool = False
    name: str = "one"


@dataclass
class Call:
    client: Client = field(default_factory=Client)
    id: int = 1


def table(**limits):
    own = Limits(**limits)
    sessions = SessionTable(own, QuotaTable({}, lambda user: (), own), lambda _: None, Journal(""))
    return sessions, RecordTable(own, sessions, Journal(""))


def opened(sessions, tokens=(1, 2, 3)):
    session = sessions.open(Client(), "m", "agent")
    session.tokens = list(tokens)
    return session


def asked(handler, request, user=1):
    return asyncio.run(handler(Call(Client(user)), request))


def keep(records, session, name="", body=b"b"):
    return asked(records.keep, KeepRecord(id=1, session=session.id, record=name, body=body)).record


def names(records, user=1):
    return [info.record for info in asked(records.list_records, ListRecords(id=1), user).records]


def test_a_record_is_its_session_s_point_and_its_user_s():
    sessions, records = table()
    session = opened(sessions)
    name = keep(records, session)
    session.tokens.append(4)
    sessions.close(session)
    found = asked(records.get, GetRecord(id=1, record=name))
    assert (found.length, found.body, found.session, found.model) == (3, b"b", session.id, "m")
    assert tokens_of(records.of_model(1, name, "m")) == [1, 2, 3]
    with pytest.raises(InvalidRequest, match="is of m"):
        records.of_model(1, name, "n")
    for handler, request in ((records.get, GetRecord), (records.drop, DropRecord)):
        with pytest.raises(NotFound):
            asked(handler, request(id=1, record=name), user=2)
    assert names(records, user=2) == []
    asked(records.drop, DropRecord(id=1, record=name))
    assert names(records) == [] and sessions.tenant(1).ledger.used(JOURNAL_BYTES) == 0


def test_the_oldest_of_too_many_goes():
    sessions, records = table(records_per_user=2)
    session = opened(sessions)
    assert [keep(records, session, name) for name in "abab"] == ["a", "b", "a", "b"]
    assert names(records) == ["a", "b"]
    keep(records, session, "c")
    assert names(records) == ["b", "c"]


def test_a_record_without_room_in_the_journal_replaces_kept_sessions_and_then_records():
    room = 3 * (SESSION_BYTES + RECORD_BYTES)
    sessions, records = table(journal_bytes_per_user=room, conversations_per_user=10)
    session = opened(sessions, ())
    kept = sessions.open(Client(), "m", "agent", attached=False)
    sessions.keep(kept, sessions.conversations.choose(1, "m", "", []).kept)
    ledger = sessions.tenant(1).ledger
    keep(records, session, "a", bytes(room - ledger.used(JOURNAL_BYTES) - RECORD_BYTES))
    keep(records, session, "b", b"")
    assert kept.is_closed and names(records) == ["a", "b"]
    keep(records, session, "c", bytes(RECORD_BYTES))
    assert names(records) == ["b", "c"]
    used = ledger.used(JOURNAL_BYTES)
    for name in ("c", "d"):
        with pytest.raises(QuotaExceeded):
            keep(records, session, name, bytes(room))
    assert names(records) == ["b", "c"] and ledger.used(JOURNAL_BYTES) == used


def test_sessions_and_records_give_way_together_where_neither_would_do():
    room = 2 * SESSION_BYTES + 2 * RECORD_BYTES
    sessions, records = table(journal_bytes_per_user=room)
    session = opened(sessions, ())
    kept = sessions.open(Client(), "m", "agent", attached=False)
    sessions.keep(kept, sessions.conversations.choose(1, "m", "", []).kept)
    for name in "ab":
        keep(records, session, name, b"")
    keep(records, session, "c", bytes(2 * RECORD_BYTES + SESSION_BYTES - RECORD_BYTES))
    assert kept.is_closed and names(records) == ["c"]
    assert sessions.tenant(1).ledger.used(JOURNAL_BYTES) == room


def test_some_cannot_be_kept():
    sessions, records = table(record_bytes=10)
    session = opened(sessions)
    with pytest.raises(InvalidRequest, match="11 bytes"):
        keep(records, session, body=bytes(11))
    with session.in_use(Call()), pytest.raises(SessionBusy):  # type: ignore[arg-type]
        keep(records, session)
    session.add_edit(Edit(1, (), "scale", (Extent(0),)), [])
    with pytest.raises(InvalidRequest, match="fork"):
        keep(records, session)
    with pytest.raises(InvalidRequest, match="a session, or a model"):
        asked(records.keep, KeepRecord(id=1))


def test_a_record_without_a_session_has_no_tokens():
    _, records = table()
    name = asked(records.keep, KeepRecord(id=1, model="m", body=b"x")).record
    assert asked(records.get, GetRecord(id=1, record=name)).length == 0


def test_records_of_an_earlier_daemon_are_charged_and_expire():
    async def play(ttl):
        sessions, records = table(record_ttl=ttl)
        for name, age in (("old", 101), ("young", 0)):
            records.restore([Recorded(1, name, "m", "s", time.time() - age, pack([1, 2]), b"body")])
        records.close()
        own = [info.record for info in (await records.list_records(Call(), ListRecords(id=1))).records]
        return own, sessions.tenant(1).ledger.used(JOURNAL_BYTES) // (RECORD_BYTES + 12)

    assert asyncio.run(play(100)) == (["young"], 1)
    assert asyncio.run(play(0)) == (["old", "young"], 2)
