from __future__ import annotations

import asyncio
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass

import pytest

from djinn_client.errors import ModelNotFound, NotPermitted, QuotaExceeded, SessionBusy, SessionLost, SessionNotFound
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.points import Point
from djinnd.config import Limits, Quota
from djinnd.core.edits import Edit, Extent
from djinnd.server.journal.file import JournalContent
from djinnd.server.journal.journal import Journal
from djinnd.server.journal.tables.conversations import ConversationKept
from djinnd.server.journal.tables.edits import Edited, EditsCut, EditsEnded
from djinnd.server.journal.tables.sessions import JournalSession
from djinnd.server.probe_lists.breakpoint_list import SessionBreakpoint
from djinnd.server.probe_lists.edit_list import PART_BYTES
from djinnd.server.quotas.ledger import JOURNAL_BYTES
from djinnd.server.quotas.quotas import QuotaTable
from djinnd.server.sessions.conversations import ConversationState
from djinnd.server.sessions.session import SESSION_BYTES
from djinnd.server.sessions.sessions import SessionTable

UNLIMITED = QuotaTable({}, lambda user: ())


@dataclass(eq=False)
class FakeClient:
    user: int = 1000
    is_admin: bool = False
    name: str = "somebody"


class FakeCall:
    def __init__(self):
        self.cancelled = 0

    def cancel(self):
        self.cancelled += 1


@pytest.fixture
def table():
    """Makes a table with these limits, and a list of the sessions that it has closed."""

    def make(quotas=UNLIMITED, journal=None, **limits):
        closed = []
        return SessionTable(Limits(**limits), quotas, closed.append, journal or Journal("")), closed

    return make


def left(sessions, conversations=()):
    """The content of a journal with these sessions."""
    return JournalContent(sessions, [], {}, {}, dict(conversations), [], time.time())


def test_a_session_is_visible_to_its_owner_and_administrators(table):
    sessions, _ = table()
    owner = FakeClient(1)
    session = sessions.open(owner, "m", "agent")
    assert sessions.lookup(session.id, owner) is session
    assert sessions.lookup(session.id, FakeClient(1)) is session
    assert sessions.lookup(session.id, FakeClient(2, is_admin=True)) is session
    assert sessions.visible(FakeClient(1)) == sessions.visible(FakeClient(3, is_admin=True)) == [session]
    assert sessions.visible(FakeClient(2)) == []


def test_another_user_s_session_and_an_unknown_one_give_the_same_error(table):
    sessions, _ = table()
    session = sessions.open(FakeClient(1), "m", "agent")
    answers = []
    for name in (session.id, "0" * 16):
        with pytest.raises(SessionNotFound) as caught:
            sessions.lookup(name, FakeClient(2))
        answers.append((type(caught.value), caught.value.message.replace(name, "…"), set(caught.value.data)))
    assert answers[0] == answers[1]


def test_ids_cannot_be_guessed(table):
    sessions, _ = table(sessions_per_user=500)
    ids = {sessions.open(FakeClient(1), "m", "batch").id for _ in range(500)}
    assert len(ids) == 500 and {len(name) for name in ids} == {16}


def test_limits_of_a_user_and_of_all(table):
    sessions, _ = table(sessions=3, sessions_per_user=2)
    first = sessions.open(FakeClient(1), "m", "agent")
    sessions.open(FakeClient(1), "m", "agent")
    with pytest.raises(NotPermitted, match="you have 2 sessions"):
        sessions.open(FakeClient(1), "m", "agent")
    sessions.open(FakeClient(2), "m", "agent")
    with pytest.raises(NotPermitted, match="the daemon has 3 sessions"):
        sessions.open(FakeClient(3), "m", "agent")
    sessions.close(first)
    sessions.open(FakeClient(3), "m", "agent")
    assert len(sessions) == 3


def test_idle_kept_sessions_leave_places_for_others(table):
    sessions, _ = table(sessions_per_user=3)
    sessions.open(FakeClient(1), "m", "agent")
    kept = sessions.open(FakeClient(1), "m", "agent", attached=False)
    assert sessions.openable(1) == 1
    sessions.keep(kept, ConversationState("", 0, b""))
    assert sessions.openable(1) == 2 and sessions.idle_bytes(1) == SESSION_BYTES
    with kept.in_use(FakeCall()):
        assert sessions.openable(1) == 1 and sessions.idle_bytes(1) == 0
    assert sessions.openable(2) == 3


def test_kept_sessions_stay_where_their_end_would_not_make_room(table):
    quotas = QuotaTable({}, lambda user: (), Limits(journal_bytes_per_user=3 * SESSION_BYTES))
    sessions, closed = table(quotas)
    sessions.open(FakeClient(1), "m", "agent")
    for _ in range(2):
        sessions.keep(sessions.open(FakeClient(1), "m", "agent", attached=False), ConversationState("", 0, b""))
    sessions.make_room(1, 3 * SESSION_BYTES)
    assert closed == []
    sessions.make_room(1, SESSION_BYTES)
    assert len(closed) == 1
    sessions.make_room(1, 2 * SESSION_BYTES)
    assert len(closed) == 2


def test_quotas_apply_to_sessions_and_forks_of_their_users(table):
    rule = Quota(users=(1,), sessions=2, highest_class="agent")
    sessions, _ = table(QuotaTable({"few": rule}, lambda user: ()))
    limited, free = FakeClient(1), FakeClient(2)
    with pytest.raises(QuotaExceeded, match="highest_class is agent"):
        sessions.open(limited, "m", "interactive")
    parent = sessions.open(limited, "m", "agent")
    with pytest.raises(QuotaExceeded, match="highest_class is agent"):
        sessions.fork(parent, limited, "interactive")
    fork = sessions.fork(parent, limited, "batch")
    for again in (lambda: sessions.fork(parent, limited, None), lambda: sessions.open(limited, "m", "batch")):
        with pytest.raises(QuotaExceeded, match=r"quotas\.few\.sessions is 2"):
            again()
    assert fork.tenant is parent.tenant and sessions.count(1) == 2
    for _ in range(3):
        sessions.open(free, "m", "interactive")
    sessions.close(fork)
    sessions.open(limited, "m", "agent")


def test_a_session_has_one_call_at_a_time_and_is_free_after_a_failure(table):
    sessions, _ = table()
    session = sessions.open(FakeClient(), "m", "agent")
    with suppress(ZeroDivisionError), session.in_use(FakeCall()):
        with pytest.raises(SessionBusy, match=session.id), session.in_use(FakeCall()):
            pytest.fail("two calls at once")
        with pytest.raises(SessionBusy):
            session.expect_idle()
        raise ZeroDivisionError
    session.expect_idle()


def test_closing_cancels_the_call_and_is_reported_once(table):
    sessions, closed = table()
    session = sessions.open(FakeClient(), "m", "agent")
    call = FakeCall()
    with session.in_use(call):
        sessions.close(session)
        sessions.close(session)
    assert (closed, call.cancelled, len(sessions)) == ([session], 1, 0)


def test_sessions_of_a_model(table):
    sessions, closed = table()
    mine = sessions.open(FakeClient(), "m", "agent")
    sessions.open(FakeClient(), "other", "agent")
    assert sessions.of_model("m") == [mine]
    sessions.leave()
    assert not closed and not list(sessions)


def test_a_session_outlives_its_last_connection_for_the_grace_time_only(table):
    async def play():
        sessions, closed = table(session_grace=0.01)
        one, two = FakeClient(), FakeClient()
        session = sessions.open(one, "m", "agent")
        sessions.attach(session, two)
        sessions.detach(one)
        assert session.attached == {two} and session.grace is None
        sessions.detach(two)
        assert session.grace is not None
        sessions.attach(session, one)
        assert session.grace is None, "a client came back in time"
        sessions.detach(one)
        sessions.detach(one)
        async with asyncio.timeout(60):
            while not closed:
                await asyncio.sleep(0)
        assert closed == [session] and len(sessions) == 0

    asyncio.run(play())


def test_closing_a_session_ends_its_grace_time(table):
    async def play():
        sessions, _ = table()
        only = FakeClient()
        session = sessions.open(only, "m", "agent")
        sessions.detach(only)
        sessions.close(session)
        assert session.grace.cancelled()

    asyncio.run(play())


def test_a_fork_has_its_parent_s_tokens_and_is_independent(table):
    sessions, closed = table(sessions_per_user=3)
    owner = FakeClient(1)
    parent = sessions.open(owner, "m", "agent")
    parent.tokens += [1, 2]
    other = FakeClient(1)
    fork = sessions.fork(parent, other, None)
    assert (fork.model, fork.user, fork.priority, fork.tokens) == ("m", 1, "agent", [1, 2])
    assert fork.id != parent.id and fork.attached == {other}
    fork.tokens.append(3)
    assert parent.tokens == [1, 2]
    assert sessions.fork(fork, owner, "batch").priority == "batch"
    with pytest.raises(NotPermitted, match="you have 3 sessions"):
        sessions.fork(fork, owner, None)
    sessions.close(parent)
    assert closed == [parent] and len(sessions) == 2


def test_a_busy_session_and_another_user_s_cannot_be_forked(table):
    sessions, _ = table()
    parent = sessions.open(FakeClient(1), "m", "agent")
    with pytest.raises(SessionBusy), parent.in_use(FakeCall()):
        sessions.fork(parent, FakeClient(1), None)
    with pytest.raises(NotPermitted, match="another user's"):
        sessions.fork(parent, FakeClient(2, is_admin=True), None)
    assert len(sessions) == 1


def kept(name, **changes):
    now = time.time()
    fields = {"user": 1, "model": "m", "shared": False, "priority": "agent", "created": now - 90, "used": now - 60}
    return JournalSession(name, **fields | changes, tokens=array("I", [1, 2, 3]))


def test_restored_sessions_begin_as_detached_and_count(table):
    async def play():
        sessions, _ = table(sessions_per_user=2)
        sessions.restore(left([kept("a"), kept("b", used=time.time() + 900)]))
        owner = FakeClient(1)
        first, second = sessions.visible(owner)
        assert first.tokens == [1, 2, 3] and first.journalled == 3
        now = time.monotonic()
        assert 60 <= now - first.used < 89 and now - first.created >= 90
        assert second.used <= now, "the clock was set back"
        with pytest.raises(NotPermitted, match="you have 2 sessions"):
            sessions.open(owner, "m", "agent")
        assert first.grace is not None
        sessions.attach(first, owner)
        assert first.grace is None and sessions.of_model("m") == [first, second]
        sessions.leave()

    asyncio.run(play())


def test_a_restored_session_of_a_shared_model_belongs_to_no_other_model(table):
    async def play():
        sessions, _ = table()
        sessions.restore(left([kept("a", shared=True)]))
        (session,) = sessions
        assert sessions.of_model("m") == []
        with pytest.raises(ModelNotFound, match="m was shared by a client and was lost"):
            session.expect_model()
        sessions.close(session)
        sessions.leave()

    asyncio.run(play())


def test_the_longest_unused_detached_sessions_beyond_the_limit_are_closed(table):
    async def play():
        sessions, closed = table(detached_per_user=2)
        owner, stranger = FakeClient(1), FakeClient(2)
        mine = [sessions.open(owner, "m", "agent") for _ in range(4)]
        kept = sessions.open(FakeClient(1), "m", "agent")  # over another connection
        theirs = sessions.open(stranger, "m", "agent")
        for used, session in zip((30.0, 10.0, 40.0, 20.0), mine, strict=True):
            session.used = used
        sessions.detach(owner)
        assert closed == [mine[1], mine[3]]
        mine[0].used = 50.0
        late = FakeClient(1)
        sessions.attach(mine[0], late)
        sessions.detach(stranger)
        assert len(closed) == 2, "another user's sessions do not count"
        sessions.detach(late)
        assert len(closed) == 2, "two are within the limit"
        last = sessions.open(late, "m", "agent")
        sessions.detach(late)
        assert closed[2:] == [mine[2]]
        assert list(sessions) == [mine[0], kept, theirs, last]
        sessions.leave()

    asyncio.run(play())


def test_a_detached_session_with_a_call_is_closed_last(table):
    async def play():
        sessions, closed = table(detached_per_user=1)
        owner = FakeClient(1)
        at_work, idle = (sessions.open(owner, "m", "agent") for _ in range(2))
        at_work.used = 0.0
        with at_work.in_use(FakeCall()):
            sessions.detach(owner)
        assert closed == [idle]
        sessions.leave()

    asyncio.run(play())


def test_restored_sessions_do_not_count_as_detached(table):
    async def play():
        sessions, closed = table(detached_per_user=1)
        sessions.restore(left([kept(name) for name in "abc"]))
        owner = FakeClient(1)
        sessions.open(owner, "m", "agent")
        sessions.detach(owner)
        assert closed == [] and len(sessions) == 4
        sessions.leave()

    asyncio.run(play())


def test_time_to_live_counts_from_the_last_use(table):
    async def play():
        sessions, closed = table(session_ttl=100)
        sessions.restore(left([kept("young"), kept("old", used=time.time() - 101)]))
        assert [session.id for session in closed] == ["old"]
        sessions.leave()
        sessions, closed = table(session_ttl=0)
        sessions.restore(left([kept("old", used=0)]))
        assert closed == []
        sessions.leave()

    asyncio.run(play())


def test_a_later_time_to_live_applies(table, monkeypatch):
    monkeypatch.setattr("djinnd.server.sessions.sessions._SWEEP", 0.001)

    async def play():
        sessions, closed = table(session_ttl=0)
        sessions.restore(left([kept("old", used=0)]))
        sessions.limits = Limits(session_ttl=100)
        while not closed:
            await asyncio.sleep(0.001)
        assert [session.id for session in closed] == ["old"]
        sessions.leave()

    asyncio.run(play())


class Noting(Journal):
    """A journal that records changes, and the ids of sessions that are new or have other tokens."""

    def __init__(self):
        super().__init__("")
        self.noted = []

    def opened(self, session):
        self.noted.append(("opened", session.id))

    def changed(self, session):
        self.noted.append(("changed", session.id))

    def note(self, change, nbytes=0):
        self.noted.append(change)


def edit(number, first):
    return Edit(number, (Point("mlp", 1),), "scale", (Extent(first),))


def test_changes_of_edits_are_journalled_and_set_the_first_position_that_is_due(table):
    journal = Noting()
    sessions, _ = table(journal=journal)
    session = sessions.open(FakeClient(), "m", "agent")
    session.tokens += [1, 2, 3, 4, 5, 6]
    session.journalled = 6
    session.add_edit(edit(1, 4), ["a"])
    session.add_edit(edit(2, 5), ["b"])
    assert session.due_from == 4
    session.end_edits([2], 5)
    session.cut(5)
    session.cut(2)
    fork = sessions.fork(session, FakeClient(), None)
    assert fork.edits == session.edits and fork.edits is not session.edits and fork.due_from == 4
    session.end_edits([1], 1)
    assert session.due_from == 1 and fork.edits.unended == [1]
    assert [note for note in journal.noted if isinstance(note, Edited | EditsEnded | EditsCut)] == [
        Edited(session.id, edit(1, 4), ["a"]),
        Edited(session.id, edit(2, 5), ["b"]),
        EditsEnded(session.id, [2], 5),
        EditsCut(session.id, 2),
        Edited(fork.id, edit(1, 2), ["a"]),
        EditsEnded(session.id, [1], 1),
    ]


def test_a_session_with_kv_of_a_client_is_not_in_the_journal_and_may_be_lost(table):
    journal = Noting()
    sessions, closed = table(journal=journal)
    client = FakeClient()
    session = sessions.open(client, "m", "agent", salt=b"salt")
    session.tokens += [1, 2, 3]
    session.changed()
    session.add_edit(edit(1, 2), ["a"])
    session.cut(1)
    session.add_edit(edit(2, 0), ["a"])
    session.end_edits([2], 0)
    session.tokens += [2, 3, 4]
    assert session.fixed == 3, "the last position is always computed"
    session.stopped(HitInfo(breakpoint=1, point="a", block=1, first=1, end=4, prompt_end=4))
    assert session.fixed == 1, "positions that stopped lie behind the client's KV"
    session.cut(1)
    assert session.fixed == 0
    fork = sessions.fork(session, client, None)
    assert fork.salt == b"salt" and fork.tokens == [1]
    assert session.is_servable and sessions.of_model("m") == [session, fork]
    session.is_lost = True
    assert not session.is_servable and sessions.of_model("m") == [fork]
    with pytest.raises(SessionLost, match="KV from a client"):
        session.expect_model()
    fork.expect_model()
    sessions.close(session)
    assert closed == [session] and journal.noted == []


def used(sessions, user):
    return sessions.expect_room(user, "agent").ledger.used(JOURNAL_BYTES)


def edit_of(number, nbytes):
    return Edit(number, (Point("resid", 0),), "add", (Extent(0),), rows=1, values=bytes(nbytes))


def test_a_user_is_charged_for_the_journal_bytes_of_its_sessions(table):
    quotas = QuotaTable({}, lambda user: ())
    sessions, _ = table(quotas)
    one, other = sessions.open(FakeClient(1), "m", "agent"), sessions.open(FakeClient(2), "m", "agent")
    assert used(sessions, 1) == used(sessions, 2) == SESSION_BYTES
    with one.in_use(FakeCall()):
        one.tokens += range(1000)
        one.changed()
    assert used(sessions, 1) == SESSION_BYTES + 4000
    one.add_edit(edit_of(1, 5000), ["blocks.0"])
    one.add_edit(edit_of(2, 7000), ["blocks.0"])
    one.add_breakpoint(SessionBreakpoint(1, "blocks.0", 0))
    full = used(sessions, 1)
    assert full == SESSION_BYTES + 4000 + one.edits.nbytes + PART_BYTES and one.edits.nbytes > 12_000
    fork = sessions.fork(one, FakeClient(1), None)
    assert used(sessions, 1) == 2 * full
    fork.end_breakpoints([1])
    fork.cut(0)
    assert used(sessions, 1) == full + fork.journal_bytes < 2 * full
    sessions.close(fork)
    fork.cut(0)
    fork.tokens += [1]
    fork.charge_journal()
    assert used(sessions, 1) == full, "a closed session is not charged, even if a run still changes it"
    one.end_edits([1], 0)
    assert used(sessions, 1) < full - 5000
    sessions.close(one)
    assert used(sessions, 1) == 0 and used(sessions, 2) == SESSION_BYTES
    sessions.close(other)


def test_kv_of_a_client_is_not_in_the_journal_and_not_charged(table):
    sessions, _ = table(QuotaTable({}, lambda user: ()))
    session = sessions.open(FakeClient(1), "m", "agent", salt=b"salt")
    session.tokens += range(1000)
    session.changed()
    session.add_edit(edit_of(1, 5000), ["blocks.0"])
    assert used(sessions, 1) == session.journal_bytes == 0
    sessions.close(session)


def test_more_than_the_journal_has_room_for_is_refused_and_changes_nothing(table):
    quotas = QuotaTable({"few": Quota(journal_bytes=20_000, users=(1,))}, lambda user: ())
    sessions, _ = table(quotas)
    one = sessions.open(FakeClient(1), "m", "agent")
    tenant = one.tenant
    one.add_edit(edit_of(1, 10_000), ["blocks.0"])
    before = tenant.ledger.used(JOURNAL_BYTES)
    sessions.expect_journal(tenant, 9000)
    with pytest.raises(QuotaExceeded, match=r"bytes in the journal.*quotas\.few\.journal_bytes is 20,000"):
        sessions.expect_journal(tenant, 10_000)
    with pytest.raises(QuotaExceeded):
        sessions.fork(one, FakeClient(1), None)
    assert (tenant.ledger.used(JOURNAL_BYTES), len(sessions)) == (before, 1)
    sessions.fork(sessions.open(FakeClient(2), "m", "agent"), FakeClient(2), None)


def test_restored_sessions_are_charged_beyond_the_limit(table):
    async def run():
        sessions, _ = table(QuotaTable({"few": Quota(journal_bytes=1000)}, lambda user: ()))
        sessions.restore(left([kept("a"), kept("b")]))
        assert used(sessions, 1) > 1000
        with pytest.raises(QuotaExceeded):
            sessions.open(FakeClient(1), "m", "agent")
        for session in sessions:
            sessions.close(session)
        assert used(sessions, 1) == 0
        sessions.open(FakeClient(1), "m", "agent")
        sessions.leave()

    asyncio.run(run())


def test_the_user_with_most_data_is_refused_on_a_nearly_full_disk(table, monkeypatch):
    sessions, _ = table(QuotaTable({}, lambda user: ()), journal_reserve=1 << 20)
    large, small = sessions.open(FakeClient(1), "m", "agent"), sessions.open(FakeClient(2), "m", "agent")
    large.add_edit(edit_of(1, 1 << 20), ["blocks.0"])
    monkeypatch.setattr(Journal, "free", lambda journal, nbytes=0: 900_000)
    with pytest.raises(QuotaExceeded, match=r"room for 900,000 bytes.*limits\.journal_reserve \(1,048,576\)"):
        sessions.expect_journal(large.tenant, 0)
    sessions.expect_journal(small.tenant, 100_000)
    large.end_edits([1], 0)
    sessions.expect_journal(large.tenant, 0)


# --- kept sessions --------------------------------------------------------------------------------------------------


def kept_session(sessions, prompt=(1, 2, 3), key="", user=1):
    session = sessions.open(FakeClient(user), "m", "agent", attached=False)
    session.tokens = list(prompt)
    sessions.keep(session, sessions.conversations.choose(user, "m", key, session.tokens).kept)
    return session


def test_kept_sessions_are_closed_to_make_room(table):
    sessions, closed = table(sessions_per_user=3)
    first, second = kept_session(sessions), kept_session(sessions)
    first.used, second.used = 2.0, 1.0
    for _ in range(3):
        sessions.open(FakeClient(1), "m", "agent")
    assert closed == [second, first]
    with pytest.raises(NotPermitted):
        sessions.open(FakeClient(1), "m", "agent")


def test_a_kept_session_is_not_closed_to_make_room_for_its_fork(table):
    sessions, closed = table(sessions_per_user=2)
    parent, other = kept_session(sessions), kept_session(sessions)
    parent.used, other.used = 1.0, 2.0
    fork = sessions.fork(parent, FakeClient(1), None)
    assert closed == [other] and fork.tokens == parent.tokens
    with pytest.raises(NotPermitted):
        sessions.fork(parent, FakeClient(1), None)
    assert closed == [other]


def test_busy_sessions_and_those_of_other_users_are_not_closed_to_make_room(table):
    sessions, closed = table(sessions_per_user=1, sessions=2)
    kept_session(sessions, user=2)
    with kept_session(sessions).in_use(FakeCall()), pytest.raises(NotPermitted):
        sessions.open(FakeClient(1), "m", "agent")
    assert closed == []


def test_the_longest_idle_kept_session_beyond_the_limit_is_closed(table):
    sessions, closed = table(conversations_per_user=2)
    first, second = kept_session(sessions), kept_session(sessions)
    first.used = 0.0
    third = kept_session(sessions)
    assert closed == [first]
    assert set(sessions.conversations) == {second, third}


def test_a_kept_session_needs_no_client():
    async def play():
        sessions = SessionTable(Limits(session_grace=0, detached_per_user=1), UNLIMITED, closed.append, Journal(""))
        session, client = kept_session(sessions), FakeClient(1)
        sessions.attach(session, client)
        sessions.detach(client)
        await asyncio.sleep(0.01)
        assert closed == [] and session.grace is None

    closed = []
    asyncio.run(play())


def test_a_kept_session_ends_after_its_own_time_to_live():
    async def play(ttl):
        limits = Limits(conversation_ttl=ttl, session_ttl=0)
        sessions = SessionTable(limits, UNLIMITED, lambda _: None, Journal(""))
        conversations = {name: ConversationKept(name, "", 3) for name in ("old", "young")}
        old = kept("old", used=time.time() - 101)
        sessions.restore(left([kept("young"), old], conversations))
        return [session.id for session in sessions]

    assert asyncio.run(play(100)) == ["young"]
    assert asyncio.run(play(0)) == ["young", "old"]
