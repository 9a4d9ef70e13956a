"""`djinnctl restart` against a scripted daemon that goes and comes back."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from djinn_client import ModelInfo, StatusReply
from djinn_client.protocol import Done, Failure, GetStatus, Restart
from djinnctl import restart
from djinnctl.cli import main
from tests.support.scripted_daemon import Line, ScriptedDaemon

STATUS = StatusReply(
    id=0,
    version="0.1.0",
    pid=4711,
    uptime_s=9.0,
    address="/run/djinnd/djinnd.sock",
    state="ready",
    devices=[],
    models=[],
    sessions={"interactive": 2, "agent": 1, "batch": 0},
    requests_running=0,
    requests_queued=0,
    connections=1,
    arena_bytes=0,
)
LLAMA = ModelInfo(name="llama", path="/models/llama", state="loading")


def tell(line: Line, **fields: object) -> None:
    line.send(replace(STATUS, id=line.expect(GetStatus).id, **fields))


def ends(line: Line) -> None:
    """The predecessor: asked, it answers, is seen to drain, and closes the connection."""
    line.welcome()
    request = line.expect(Restart)
    assert request.warm
    line.send(Done(id=request.id))
    tell(line, state="draining")
    for code in ("cancelled", "shutting_down"):  # the first is an older daemon's
        line.send(Failure(id=line.expect(GetStatus).id, code=code, message="the daemon is stopping"))


def begins(line: Line) -> None:
    line.welcome()
    tell(line, state="starting", sessions={})
    tell(line, models=[LLAMA, ModelInfo(name="other", path="/models/other", state="available")])


def run(*arguments: str) -> Result:
    return CliRunner(env={"DJINND_ADDRESS": ""}).invoke(main, arguments)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "PAUSE", 0.001)
    monkeypatch.setattr(restart, "PATIENCE", 0.01)


def test_it_returns_when_the_successor_serves_and_says_what_is_there(daemon: ScriptedDaemon) -> None:
    result = run("restart", "--warm", "--address", daemon.play(ends, begins))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("djinnd 0.1.0 (pid 4711) is ready after ")
    assert result.stdout.endswith(" s and loads again llama; 3 sessions are there\n")


def test_a_restart_is_reported_as_json(daemon: ScriptedDaemon) -> None:
    told = json.loads(run("restart", "--warm", "--json", "--address", daemon.play(ends, begins)).stdout)
    assert told.pop("seconds") > 0
    assert told == {
        "warm": True,
        "version": "0.1.0",
        "pid": 4711,
        "state": "ready",
        "sessions": 3,
        "models": ["llama"],
    }


def test_a_daemon_that_does_not_come_back(daemon: ScriptedDaemon) -> None:
    result = run("restart", "--warm", "--address", daemon.play(ends, lambda line: None))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "djinnctl: " in result.stderr


def test_restart_is_refused_to_other_users(daemon: ScriptedDaemon) -> None:
    def refuse(line: Line) -> None:
        line.welcome()
        request = line.expect(Restart)
        assert not request.warm
        line.send(Failure(id=request.id, code="not_permitted", message="only an administrator may"))
        line.expect_hang_up()

    result = run("restart", "--address", daemon.play(refuse))
    assert (result.exit_code, result.stderr) == (1, "djinnctl: only an administrator may\n")


def test_the_help_says_what_survives() -> None:
    assert "Sessions survive it" in " ".join(run("restart", "--help").stdout.split())
