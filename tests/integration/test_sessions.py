"""Sessions that outlive a connection: detached, attached by another process, and closed after their grace time."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import djinn_client as djinn
from djinnctl.restart import restart
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import ROOT, Daemon, clean_environ, wait_for
from tests.support.models import reduced_model

GO_ON = """
import json, sys
import djinn_client as djinn
s = djinn.Session.attach(sys.argv[1])
print(json.dumps([s.token_ids(), s.generate(max_tokens=16, ignore_eos=True).token_ids]))
s.detach()
"""


def test_another_process_continues_a_session(daemon: Daemon) -> None:
    with djinn.Session(MODEL, address=daemon.address) as s:
        whole = s.generate("import ", max_tokens=48, ignore_eos=True).token_ids
    mine = djinn.Session(MODEL, address=daemon.address)
    mine.generate("import ", max_tokens=16, ignore_eos=True)
    tokens = mine.token_ids()
    mine.detach()
    environ = clean_environ() | {"DJINND_ADDRESS": daemon.address}
    other = subprocess.run(
        [sys.executable, "-c", GO_ON, mine.id], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert other.returncode == 0, other.stderr
    assert json.loads(other.stdout) == [tokens, whole[16:32]]
    with djinn.Session.attach(mine.id, address=daemon.address) as again:
        assert again.token_ids() == [*tokens, *whole[16:32]]
        assert again.generate(max_tokens=16, ignore_eos=True).token_ids == whole[32:]
    with pytest.raises(djinn.SessionNotFound):
        djinn.Session.attach(mine.id, address=daemon.address)


def test_a_detached_session_is_closed_after_its_grace_time(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon({"limits": {"session_grace": "1s"}})
    with djinn.Session(MODEL, address=daemon.address) as kept, daemon.client() as client:
        kept.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        left = djinn.Session(MODEL, address=daemon.address)
        left.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        left.detach()
        wait_for(lambda: [info.id for info in client.sessions()] == [kept.id])
        assert [model.pages_used for model in client.models()] == [1]
        with pytest.raises(djinn.SessionNotFound):
            djinn.Session.attach(left.id, address=daemon.address)
        assert len(kept.generate(max_tokens=4, ignore_eos=True).token_ids) == 4
        assert client.status(check=True).integrity == []


@pytest.mark.parametrize("warm", [pytest.param(False, marks=pytest.mark.long), True], ids=["cold", "warm"])
def test_a_restart_keeps_sessions(start_daemon: DaemonStarter, warm: bool) -> None:
    daemon = start_daemon({"limits": {"sessions": 2}})
    with djinn.Session(MODEL, address=daemon.address) as s:
        whole = s.generate("import ", max_tokens=32, ignore_eos=True).token_ids
    left, idle = (djinn.Session(MODEL, priority="batch", address=daemon.address) for _ in range(2))
    left.generate("import ", max_tokens=16, ignore_eos=True)
    tokens = left.token_ids()
    left.detach()  # the other session is attached when the daemon stops
    with daemon.client() as client:
        done = restart(client, warm=warm)
        assert (done.state, done.sessions) == ("ready", 2)
        infos = {info.id: info for info in client.sessions()}
        assert {name: (info.state, info.tokens, info.priority) for name, info in infos.items()} == {
            left.id: ("detached", len(tokens), "batch"),
            idle.id: ("detached", 0, "batch"),
        }
        assert infos[left.id].age_s >= infos[left.id].idle_s > 0
        with pytest.raises(djinn.NotPermitted, match="the daemon has 2 sessions"):
            djinn.Session(MODEL, address=daemon.address)
        with (
            djinn.Session.attach(left.id, address=daemon.address) as s,
            djinn.Session.attach(idle.id, address=daemon.address),
        ):
            assert s.token_ids() == tokens
            assert s.generate(max_tokens=16, ignore_eos=True).token_ids == whole[16:]
        idle.detach()
        restart(client, warm=warm)
        assert client.sessions() == []
        assert client.status(check=True).integrity == []


@pytest.mark.long
def test_the_grace_time_begins_again_with_the_next_daemon(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon({"limits": {"session_grace": "1s"}})
    left = djinn.Session(MODEL, address=daemon.address)
    with daemon.client() as client:
        restart(client, warm=True)
        wait_for(lambda: client.sessions() == [])
        restart(client, warm=True)
        assert client.sessions() == []
    left.detach()
    _, *lives = daemon.log.split("journal_opened ")
    assert [re.findall(r"sessions=(\d+)", life)[0] for life in lives] == ["0", "1", "0"], (
        "sessions restored by each daemon"
    )
    assert [f"session_closed session={left.id}" in life for life in lives] == [False, True, False]


@pytest.mark.long
def test_an_unused_session_is_closed_after_its_time_to_live(start_daemon: DaemonStarter) -> None:
    daemon = start_daemon({"limits": {"session_ttl": "3s"}})
    with daemon.client() as client:
        client.load(MODEL)
        session = djinn.Session(MODEL, address=daemon.address)
        session.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        wait_for(lambda: client.sessions() == [])
        with pytest.raises(djinn.SessionNotFound):
            session.generate(max_tokens=1)
        session.detach()
        assert client.status(check=True).integrity == []


def test_a_session_of_a_missing_model(start_daemon: DaemonStarter, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(reduced_model("llama-2"), tmp_path / "checkpoint"))
    daemon = start_daemon(errors=["model_failed"])
    session = djinn.Session(str(checkpoint), address=daemon.address)
    session.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
    tokens = session.token_ids()
    with daemon.client() as client:
        restart(client, warm=False)
        shutil.rmtree(checkpoint)
        session.detach()
        session = djinn.Session.attach(session.id, address=daemon.address)
        assert session.token_ids() == tokens
        with pytest.raises((djinn.ModelNotFound, djinn.ModelRejected), match="no such folder"):
            session.generate(max_tokens=1)
        session.truncate(2)
        assert session.token_ids() == tokens[:2]
        session.close()
        assert client.sessions() == []
        assert client.status(check=True).integrity == []
