"""Public prefixes: permissions, their life, and when the scripted engine is told of them."""

from __future__ import annotations

import os
import signal

import pytest

import djinn_client as djinn
from djinn_client import errors
from djinn_client.errors import NotFound, NotPermitted
from djinn_client.protocol import ListPrefixes, PublishPrefix, WithdrawPrefix
from djinnd.config import Limits
from djinnd.server.journal.journal import Journal
from djinnd.server.journal.tables.prefixes import Published, Withdrawn
from djinnd.server.sessions.prefixes import PrefixTable
from tests.support.other_user import as_user, only_root, open_to_all
from tests.support.scripted_engine.script import PAGE_SIZE
from tests.support.served import Wire, is_listening, wait_for

SYSTEM = list(range(3 * PAGE_SIZE + 5))


def table(**limits):
    return PrefixTable(Limits(**limits), Journal(""))


def test_the_same_tokens_are_one_prefix_of_each_model():
    prefixes = table()
    first = prefixes.publish("m", 0, [1, 2, 3], shared=False)
    assert prefixes.publish("m", 1, [1, 2, 3], shared=False) is first
    others = [
        prefixes.publish("m", 0, [1, 2], shared=False),
        prefixes.publish("n", 0, [1, 2, 3], shared=False),
        prefixes.publish("m", 0, [1, 2, 3], shared=True),
    ]
    assert [prefix.id for prefix in prefixes] == [prefix.id for prefix in [first, *others]]
    assert prefixes.of_model("m", shared=False) == [first, others[0]]
    assert prefixes.of_model("m", shared=True) == [others[2]]


def test_a_model_has_a_limited_number_of_prefixes():
    prefixes = table(public_prefixes_per_model=2)
    one = prefixes.publish("m", 0, [1], shared=False)
    prefixes.publish("m", 0, [2], shared=False)
    with pytest.raises(NotPermitted, match="m has 2 public prefixes, the limit") as caught:
        prefixes.publish("m", 0, [3], shared=False)
    assert caught.value.data == {"prefixes": 2}
    assert prefixes.publish("m", 0, [1], shared=False) is one
    prefixes.publish("n", 0, [3], shared=False)
    prefixes.publish("m", 0, [3], shared=True)
    prefixes.withdraw(one.id)
    prefixes.publish("m", 0, [3], shared=False)


def test_withdrawn_prefixes_are_gone():
    prefixes = table()
    prefix = prefixes.publish("m", 0, [1], shared=False)
    assert prefixes.withdraw(prefix.id) is prefix and list(prefixes) == []
    with pytest.raises(NotFound, match="no public prefix"):
        prefixes.withdraw(prefix.id)


def test_prefixes_of_a_client_s_model_are_not_journalled_and_go_with_it():
    written = []

    class Heard(Journal):
        def note(self, change, nbytes=0):
            written.append(change)

    prefixes = PrefixTable(Limits(), Heard(""))
    kept = prefixes.publish("m", 0, [1], shared=False)
    prefixes.publish("m", 0, [1], shared=True)
    prefixes.withdraw(prefixes.publish("n", 0, [1], shared=True).id)
    prefixes.forget_shared("m")
    assert list(prefixes) == [kept] and [type(change) for change in written] == [Published]
    prefixes.withdraw(kept.id)
    assert written[1:] == [Withdrawn(kept.id)]


def test_prefixes_are_restored_from_the_journal():
    prefixes = table()
    prefixes.restore([Published("p", "m", 7, 1.5, [1, 2])])
    (prefix,) = prefixes.of_model("m", shared=False)
    assert (prefix.info.id, prefix.info.user, prefix.info.created, prefix.info.tokens) == ("p", 7, 1.5, 2)
    assert prefixes.publish("m", 0, [1, 2], shared=False) is prefix


# --- over real sockets ----------------------------------------------------------------------------------------------


def told(client):
    """The public prefixes that the engine knows, from the model's notes."""
    (model,) = client.models()
    return [note for note in model.notes if note.startswith("public")]


@pytest.fixture
def daemon(serve):
    return serve()


def test_the_engine_is_told_of_full_pages_and_the_administrator_of_their_number(daemon):
    with djinn.Session("djinn-tiny", address=daemon.address) as session, daemon.client() as client:
        session.generate(SYSTEM, max_tokens=1)
        whole = client.publish_prefix(session.id)
        assert (whole.model, whole.tokens, whole.user) == ("djinn-tiny", 3 * PAGE_SIZE, os.getuid())
        assert client.publish_prefix(session.id, 3 * PAGE_SIZE + 1) == whole, "the same prefix"
        part = client.publish_prefix(session.id, PAGE_SIZE)
        assert client.prefixes() == [whole, part] and part.created >= whole.created
        public = [f"public: {tokens} tokens before session 1" for tokens in (48, 48, 16)]
        assert told(client) == public
        assert client.withdraw_prefix(whole.id) is True
        assert client.prefixes() == [part]
        assert told(client) == public
        assert client.status(check=True).integrity == []


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (
            PAGE_SIZE - 1,
            f"15 tokens are less than a page, and only full pages are shared: .* at least {PAGE_SIZE}",
        ),
        (0, "0 tokens are less than a page"),
        (-PAGE_SIZE, "-16 tokens are less than a page"),
        (1000, "the session has 54 tokens, not 1,000"),
    ],
)
def test_invalid_prefixes_are_refused(calm, tokens, words):
    with djinn.Session("djinn-tiny", address=calm.address) as session, calm.client() as client:
        session.generate(SYSTEM, max_tokens=1)
        with pytest.raises(errors.InvalidRequest, match=words) as caught:
            client.publish_prefix(session.id, tokens)
        assert caught.value.data["field"] == "tokens"
        assert client.prefixes() == []


def test_unknown_sessions_and_prefixes_are_refused(calm):
    with calm.client() as client:
        with pytest.raises(errors.SessionNotFound):
            client.publish_prefix("0" * 16)
        with pytest.raises(errors.NotFound, match="djinnctl prefix list"):
            client.withdraw_prefix("0" * 16)
    with djinn.Session("djinn-tiny", address=calm.address) as session, calm.client() as client:
        with pytest.raises(errors.InvalidRequest, match="0 tokens are less than a page") as caught:
            client.publish_prefix(session.id)
        assert caught.value.data["page_size"] == PAGE_SIZE


def test_a_session_with_a_call_cannot_be_published(serve):
    daemon = serve(gated=True)
    with djinn.Session("djinn-tiny", address=daemon.address) as session, daemon.client() as client:
        stream = session.stream(SYSTEM, max_tokens=2)
        daemon.step()
        next(stream)
        with pytest.raises(errors.SessionBusy):
            client.publish_prefix(session.id)
        daemon.step()
        list(stream)
        assert client.publish_prefix(session.id).tokens == 3 * PAGE_SIZE


def test_the_next_engine_is_told_before_it_has_the_sessions(daemon):
    with djinn.Session("djinn-tiny", address=daemon.address) as session, daemon.client() as client:
        session.generate(SYSTEM, max_tokens=1)
        client.publish_prefix(session.id)
        gone = client.publish_prefix(session.id, PAGE_SIZE)
        (device,) = client.status().devices
        os.kill(device.pid, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 1)
        session.generate(max_tokens=1)
        assert told(client) == [f"public: {tokens} tokens before session 0" for tokens in (48, 16)]
        client.withdraw_prefix(gone.id)
        client.unload("djinn-tiny", force=True)
        client.load("djinn-tiny")
        assert told(client) == ["public: 48 tokens before session 0"]
        client.unload("djinn-tiny")
        assert client.withdraw_prefix(client.prefixes()[0].id) is False, "no engine has the model loaded"


@pytest.mark.parametrize("death", [signal.SIGTERM, signal.SIGKILL])
def test_the_next_daemon_has_the_prefixes(daemon, death):
    with daemon.client() as client, djinn.Session("djinn-tiny", address=daemon.address) as session:
        session.generate(SYSTEM, max_tokens=1)
        kept, gone = client.publish_prefix(session.id), client.publish_prefix(session.id, PAGE_SIZE)
        client.withdraw_prefix(gone.id)
        session.detach()
    daemon.signal(death)
    daemon.process.wait(30)
    daemon.start()
    wait_for(lambda: is_listening(daemon.address))
    with daemon.client() as client:
        assert client.prefixes() == [kept]
        client.load("djinn-tiny")
        assert told(client) == ["public: 48 tokens before session 0"]


@only_root
def test_only_an_administrator_may_publish(serve):
    daemon = serve()
    open_to_all(daemon.folder, daemon.address)
    with as_user():
        wire = Wire(daemon.address)
    requests = [PublishPrefix(id=1, session="0"), ListPrefixes(id=2), WithdrawPrefix(id=3, prefix="0")]
    with wire:
        refused = [wire.ask(request) for request in requests]
    assert [reply.code for reply in refused] == ["not_permitted"] * 3
    assert all(reply.message.startswith("only an administrator may") for reply in refused)
