"""Tokens that are revoked, expired, unknown, over quota or shown again: a typed error, and other clients are served."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

import djinn_client as djinn
from djinn_client.protocol import (
    AddToken,
    Failure,
    Generate,
    Generated,
    GetQuotas,
    Hello,
    ListSessions,
    ListTokens,
    OpenSession,
    Ping,
    RevokeToken,
    SessionOpened,
    SetPriority,
    Welcome,
    encode,
)
from djinnd.config.principals import number_of
from tests.support.served import Served, Wire, wait_for

pytestmark = pytest.mark.smoke

MODEL = "djinn-tiny"
UNKNOWN = "djn_" + "A" * 43


class Bearer(Wire):
    """A connection that has shown a token."""

    def __init__(self, daemon: Served, token: str) -> None:
        super().__init__(daemon.address, hello=False)
        self.answer = self.ask(Hello(id=7, token=token))

    def is_refused(self) -> bool:
        """True if the connection got a typed error and was closed."""
        is_failure = isinstance(self.answer, Failure) and (self.answer.id, self.answer.code) == (7, "not_authenticated")
        return is_failure and self.reply() is None


@pytest.fixture
def admin(calm: Served) -> Iterator[djinn.Client]:
    with calm.client() as client:
        yield client
        for token in client.tokens():
            client.revoke_token(token.name)
        assert client.status(check=True).integrity == []


def test_a_name_is_a_tenant_of_its_own(calm: Served, admin: djinn.Client) -> None:
    token = admin.add_token("tenant").token
    with Bearer(calm, token) as ci, Wire(calm.address) as other:
        assert (ci.answer.user, ci.answer.name, ci.answer.admin) == (number_of("tenant"), "tenant", False)
        mine = ci.ask(OpenSession(id=1, model=MODEL)).session
        theirs = other.ask(OpenSession(id=1, model=MODEL)).session
        assert [info.id for info in ci.ask(ListSessions(id=2)).sessions] == [mine.id]
        assert (mine.user, mine.user_name) == (number_of("tenant"), "tenant")
        assert ci.ask(Generate(id=3, session=theirs.id, text="x")).code == "session_not_found"
        for request in (AddToken(id=4, name="x"), ListTokens(id=4), RevokeToken(id=4, name="tenant")):
            assert ci.ask(request).code == "not_permitted"
        assert isinstance(ci.ask(Generate(id=5, session=mine.id, text="def ", max_tokens=2)), Generated)
        assert "tenant" in {use.user_name for use in admin.quotas(all=True)}
    admin.close_session(mine.id)


def test_a_unix_user_s_token_is_that_user(calm: Served, admin: djinn.Client) -> None:
    with Wire(calm.address) as local, Bearer(calm, admin.add_token("laptop", user="0").token) as remote:
        assert (remote.answer.user, remote.answer.admin) == (0, True)
        session = local.ask(OpenSession(id=1, model=MODEL)).session.id
        assert isinstance(remote.ask(Generate(id=1, session=session, text="x", max_tokens=1)), Generated)


def test_unknown_expired_and_revoked_tokens_get_one_answer(calm: Served, admin: djinn.Client) -> None:
    revoked, expired = admin.add_token("revoked").token, admin.add_token("expired", expires_s=1e-6).token
    admin.revoke_token("revoked")
    answers = []
    for token in (UNKNOWN, revoked, expired, "x", "é" * 4096, revoked[:-1]):
        with Bearer(calm, token) as wire:
            answers.append(wire.answer)
            assert wire.is_refused()
    assert len({(answer.message, str(answer.data)) for answer in answers}) == 1
    with pytest.raises(djinn.NotAuthenticated), djinn.Client(calm.address, token=UNKNOWN) as client:
        client.ping()


def test_revoking_ends_connections_and_their_calls(serve: Callable[..., Served]) -> None:
    daemon = serve(gated=True)
    with daemon.client() as admin:
        admin.load(MODEL)
        token = admin.add_token("ci").token
        other = admin.add_token("other").token
        with Bearer(daemon, token) as busy, Bearer(daemon, token) as idle, Bearer(daemon, other) as victim:
            session = busy.ask(OpenSession(id=1, model=MODEL)).session.id
            busy.send(Generate(id=2, session=session, token_ids=[5], max_tokens=100))
            wait_for(lambda: admin.status().requests_running + admin.status().requests_queued)
            began = time.monotonic()
            admin.revoke_token("ci")
            for wire in (busy, idle):
                assert wire.reply().code == "not_authenticated"
                while wire.reply() is not None:
                    pass
            assert time.monotonic() - began < 5, "it must take about a second"
            daemon.step(10)
            assert isinstance(victim.ask(OpenSession(id=2, model=MODEL)), SessionOpened)
            wait_for(lambda: [info.state for info in admin.sessions() if info.id == session] == ["detached"])
        with Bearer(daemon, token) as replayed:
            assert replayed.is_refused(), "refused on another connection too"
        again = admin.add_token("ci").token
        assert again != token
        with Bearer(daemon, again) as back:
            assert [info.id for info in back.ask(ListSessions(id=1)).sessions] == [session]


def test_a_client_that_reads_nothing_is_closed_too(calm: Served, admin: djinn.Client) -> None:
    token = admin.add_token("deaf").token
    with Bearer(calm, token) as deaf:
        before = admin.status().connections
        deaf.send(*(ListSessions(id=n) for n in range(50)))
        admin.revoke_token("deaf")
        wait_for(lambda: admin.status().connections == before - 1)


def test_an_expired_token_ends_its_connections(calm: Served, admin: djinn.Client) -> None:
    with Bearer(calm, admin.add_token("brief", expires_s=0.3).token) as wire:
        assert isinstance(wire.answer, Welcome)
        assert wire.reply().code == "not_authenticated"
        assert wire.reply() is None


def test_a_connection_cannot_change_its_principal(calm: Served, admin: djinn.Client) -> None:
    ci, root = admin.add_token("ci").token, admin.add_token("root-token", user="0").token
    with Bearer(calm, ci) as wire:
        assert wire.ask(Hello(id=8, token=root)).code == "protocol_error"
        assert wire.ask(ListTokens(id=9)).code == "not_permitted"


def test_the_class_of_a_token(calm: Served, admin: djinn.Client) -> None:
    """It also limits sessions that its principal has opened without the token."""
    with (
        Bearer(calm, admin.add_token("slow", user="0", highest_class="batch").token) as slow,
        Wire(calm.address) as fast,
    ):
        assert slow.ask(OpenSession(id=1, model=MODEL)).session.priority == "batch", "the token's highest class"
        assert [use.highest_class for use in slow.ask(GetQuotas(id=1)).quotas] == ["batch"]
        refused = slow.ask(OpenSession(id=1, model=MODEL, priority="agent"))
        assert (refused.code, refused.data["limit"]) == ("quota_exceeded", "batch")
        session = fast.ask(OpenSession(id=1, model=MODEL)).session
        assert session.priority == "interactive"
        assert slow.ask(Generate(id=2, session=session.id, text="x")).code == "quota_exceeded"
        assert slow.ask(SetPriority(id=3, session=session.id, priority="interactive")).code == "quota_exceeded"


def test_a_rule_for_a_name(serve: Callable[..., Served]) -> None:
    quotas = {"robots": {"users": ["ci"], "sessions": 1, "highest_class": "agent"}}
    daemon = serve(quotas=quotas, limits={"connections_per_user": 3})
    with daemon.client() as admin:
        admin.load(MODEL)
        assert "quota_user_unknown rule=robots user=ci" in daemon.log
        token = admin.add_token("ci").token
        with Bearer(daemon, token) as one, Bearer(daemon, token), Bearer(daemon, token):
            assert one.ask(OpenSession(id=1, model=MODEL)).session.priority == "agent"
            over = one.ask(OpenSession(id=2, model=MODEL))
            assert (over.code, over.data["rule"]) == ("quota_exceeded", "robots")
            with Bearer(daemon, token) as fourth:
                assert fourth.answer.code == "quota_exceeded" and fourth.reply() is None
            admin.ping()


def test_descriptors_with_hello_are_given_back(calm: Served, admin: djinn.Client) -> None:
    """They were charged to the Unix user. The next request's descriptors are charged to the principal."""
    token = admin.add_token("ci").token
    with Wire(calm.address, hello=False) as wire, open("/dev/null") as null:
        both = encode(Hello(id=0, token=token), 3) + encode(Ping(id=1), 2)
        socket.send_fds(wire.socket, [both], [null.fileno()] * 5)
        assert isinstance(wire.reply(), Welcome)
        assert wire.reply().code == "invalid_request"
    held = {use.name: use.used for each in admin.quotas(all=True) for use in each.resources}
    assert held["descriptors"] == 0


def test_tokens_survive_the_daemon_and_damage_to_their_file(serve: Callable[..., Served]) -> None:
    daemon = serve()
    with daemon.client() as admin:
        admin.load(MODEL)
        token = admin.add_token("ci").token
        with Bearer(daemon, token) as wire:
            session = wire.ask(OpenSession(id=1, model=MODEL)).session.id
    daemon.start_again(kill=True)
    with Bearer(daemon, token) as wire:
        assert [info.id for info in wire.ask(ListSessions(id=1)).sessions] == [session]
    daemon.stop()
    file = daemon.folder / "state" / "tokens"
    assert file.stat().st_mode & 0o777 == 0o600 and token not in file.read_text()
    file.write_bytes(file.read_bytes().replace(b'"ci"', b'"cj"'))
    daemon.__enter__()
    with daemon.client() as admin, Bearer(daemon, token) as wire:
        assert wire.is_refused()
        assert any("tokens.damaged-" in note for note in admin.status().notes)
        with Bearer(daemon, admin.add_token("ci").token) as back:
            assert [info.id for info in back.ask(ListSessions(id=1)).sessions] == [session]


@pytest.mark.parametrize("guesses", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_guesses_cost_other_clients_nothing(calm: Served, admin: djinn.Client, guesses: int) -> None:
    token = admin.add_token("ci").token
    with Bearer(calm, token) as victim:
        session = victim.ask(OpenSession(id=1, model=MODEL)).session.id
        alone = victim.ask(Generate(id=2, session=session, text="def ", max_tokens=8)).token_ids
        for guess in range(guesses):
            with Wire(calm.address, hello=False) as wire:
                assert wire.ask(Hello(id=0, token=f"djn_{guess}")).code == "not_authenticated"
        second = victim.ask(OpenSession(id=1, model=MODEL)).session.id
        assert victim.ask(Generate(id=3, session=second, text="def ", max_tokens=8)).token_ids == alone
        wait_for(lambda: admin.status().connections == 2)
    lines = [line for line in calm.log.splitlines() if "tokens_refused" in line]
    assert 0 < len(lines) < 100
