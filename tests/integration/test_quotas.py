"""Quotas of a real daemon: the user over a quota learns which, other users notice nothing, and SIGHUP changes
quotas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import yaml

import djinn_client as djinn
from djinn_client.protocol import CloseSession, Failure, ImportSession, SessionOpened
from tests.conftest import MODEL, DaemonStarter
from tests.support.bystander import Bystander
from tests.support.daemon import ROOT, Daemon, clean_environ, wait_for
from tests.support.other_user import NOBODY, as_user, only_root, open_to_all
from tests.support.served import Wire

pytestmark = only_root

SLOW, STARVED, STUDENT, PATIENT = 54321, 54322, 54323, 54324  # numbers without a user
GUESTS: dict[str, Any] = {"users": [NOBODY], "sessions": 2, "highest_class": "agent"}
RULES = {
    "guests": GUESTS,
    "slow": {"users": [SLOW], "tokens_per_s": 2},
    "patient": {"users": [PATIENT], "tokens_per_s": 200},
    "starved": {"users": [STARVED], "tokens_per_s": 0.001},
}


@contextmanager
def other_s(daemon: Daemon, user: int = NOBODY, **options: Any) -> Iterator[djinn.Session]:
    with as_user(user):
        session = djinn.Session(MODEL, address=daemon.address, **options)
    with session:
        yield session


@pytest.fixture(scope="module")
def limited() -> Iterator[Daemon]:
    """A daemon with a user for each test; other users have no limits."""
    with DaemonStarter() as start:
        daemon = start({"quotas": RULES})
        open_to_all(daemon.folder, daemon.address)
        djinn.load(MODEL, address=daemon.address)
        yield daemon


def refusal(error: pytest.ExceptionInfo[djinn.QuotaExceeded]) -> tuple[Any, ...]:
    data = error.value.data
    return data["quota"], data["rule"], data["limit"], data["used"]


@pytest.mark.long
def test_opened_forked_and_imported_sessions_are_limited(limited: Daemon) -> None:
    with ExitStack() as stack, Bystander(limited.address):
        first = stack.enter_context(other_s(limited, priority="agent"))
        with as_user():
            second = stack.enter_context(first.fork())
            for again in (first.fork, lambda: djinn.Session(MODEL, priority="batch", address=limited.address)):
                with pytest.raises(djinn.QuotaExceeded, match=r"quotas\.guests\.sessions is 2") as error:
                    again()
                assert refusal(error) == ("sessions", "guests", 2, 2)
            wire = stack.enter_context(Wire(limited.address))
        importing = ImportSession(id=1, model=MODEL, token_ids=[1, 2], priority="batch")
        refused = wire.ask(importing)
        assert isinstance(refused, Failure) and (refused.code, refused.data["quota"]) == ("quota_exceeded", "sessions")
        for _ in range(3):
            stack.enter_context(djinn.Session(MODEL, address=limited.address))
        second.close()
        imported = wire.ask(importing)
        assert isinstance(imported, SessionOpened)
        wire.ask(CloseSession(id=1, session=imported.session.id))


def test_classes_above_the_highest_are_refused(limited: Daemon) -> None:
    with (
        pytest.raises(djinn.QuotaExceeded, match="ask for agent or batch") as error,
        other_s(limited, priority="interactive"),
    ):
        pytest.fail("it is interactive")
    assert refusal(error) == ("highest_class", "guests", "agent", "interactive")
    with other_s(limited) as session, djinn.Session(MODEL, address=limited.address) as mine:
        assert (session.info.priority, mine.info.priority) == ("agent", "interactive"), "the highest class of each user"
        with as_user(), pytest.raises(djinn.QuotaExceeded):
            session.fork(priority="interactive")
        with pytest.raises(djinn.QuotaExceeded):
            session.set_priority("interactive")
        session.set_priority("batch")
        mine.set_priority("batch")
        mine.set_priority("interactive")


def test_tokens_per_second_are_limited(limited: Daemon) -> None:
    with other_s(limited, STARVED) as session, Bystander(limited.address):
        assert len(session.generate([1, 2, 3], max_tokens=7, ignore_eos=True).token_ids) == 7  # it may end
        for call in (
            lambda: session.generate([1], max_tokens=1),
            lambda: list(session.stream([1], max_tokens=1)),
            lambda: session.forward([1]),
        ):
            with pytest.raises(
                djinn.QuotaExceeded, match=r"quotas\.starved\.tokens_per_s is 0\.001.*try again"
            ) as error:
                call()
            quota, rule, limit, used = refusal(error)
            assert (quota, rule, limit) == ("tokens_per_s", "starved", 0.001) and used > 0
            assert 9000 < error.value.data["retry_s"] <= 10_000  # 10 tokens, of which 0.01 were available
        assert len(session.token_ids()) == 10
        with as_user(STARVED), limited.client() as client:
            (use,) = client.quotas()
        assert (use.user, use.rule, use.sessions) == (STARVED, "starved", 1)
        assert use.tokens_per_s_limit == 0.001 and use.tokens_per_s > 0


def test_tokens_recomputed_for_edits_and_exports_count(limited: Daemon) -> None:
    with other_s(limited, PATIENT) as session, Bystander(limited.address):
        session.generate([7] * 1000, max_tokens=1)

        def compute_again() -> None:
            for scale in range(1, 100):
                session.steer("blocks.0", [float(scale)] * 192, positions=[0])
                session.kv()

        with pytest.raises(djinn.QuotaExceeded, match=r"quotas\.patient\.tokens_per_s") as error:
            compute_again()
        assert error.value.data["limit"] == 200  # 2,000 at once
        assert len(session.token_ids()) == 1001


def test_a_user_over_its_quota_continues_later(limited: Daemon) -> None:
    with other_s(limited, SLOW) as session:

        def goes_on() -> bool:
            try:
                return len(session.generate([1], max_tokens=1, ignore_eos=True).token_ids) == 1
            except djinn.QuotaExceeded:
                return False

        wait_for(lambda: not goes_on())
        wait_for(goes_on)


def test_sighup_changes_the_quotas_of_the_next_call(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon(errors=["djinnd_reload_refused"])
    open_to_all(daemon.folder, daemon.address)
    with other_s(daemon) as first, other_s(daemon, STUDENT) as student:
        file = daemon.folder / "djinnd.yaml"
        daemon.reload({"quotas": {"guests": GUESTS | {"sessions": 1, "weight": 2}}})
        with pytest.raises(djinn.QuotaExceeded), other_s(daemon, priority="batch"):
            pytest.fail("a second session is one too many")
        with other_s(daemon, STUDENT):
            pass
        assert len(first.generate([1, 2], max_tokens=2, ignore_eos=True).token_ids) == 2, "the session must still exist"

        good = file.read_text()
        daemon.reload({"quotas": {"guests": {"sesions": 5}}}, told="djinnd_reload_refused ")
        line = 1 + next(place for place, text in enumerate(file.read_text().splitlines()) if "sesions" in text)
        assert f"{file}:{line}: unknown key quotas.guests.sesions; did you mean sessions?" in daemon.log
        with pytest.raises(djinn.QuotaExceeded), other_s(daemon, priority="batch"):
            pytest.fail("it is one too many, as before")
        assert len(student.generate([1, 2], max_tokens=2, ignore_eos=True).token_ids) == 2

        assert yaml.safe_load(good)["quotas"]["guests"]["sessions"] == 1
        daemon.reload({"limits": {"queue": 7}, "scheduling": {"ageing": "3s"}})
        wait_for(lambda: "policy_set interactive=0.04/0.4 agent=0.08/0.4 batch=inf/inf ageing=3" in daemon.log)
        with other_s(daemon, priority="interactive"):
            pass
        with daemon.client() as client:
            assert client.status(check=True).integrity == []


@pytest.mark.long
def test_djinnctl_quota(limited: Daemon) -> None:
    def quota(*arguments: str) -> str:
        command = [sys.executable, "-m", "djinnctl", "quota", "--address", limited.address, *arguments]
        done = subprocess.run(command, env=clean_environ(), cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with other_s(limited, priority="agent") as session:
        session.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
        (mine,) = json.loads(quota("--json"))
        assert (mine["user"], mine["rule"], mine["sessions"]) == (os.geteuid(), "", 0)
        theirs = {use["user"]: use for use in json.loads(quota("--all", "--json"))}[NOBODY]
        assert (theirs["rule"], theirs["highest_class"], theirs["sessions"]) == ("guests", "agent", 1)
        assert "guests" in quota("--all")
