"""`djinnctl nice` and `djinnctl why` against a scripted daemon."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from djinn_client import Why
from djinn_client.protocol import Done, ExplainSession, Failure, SetPriority, WhyReply
from djinnctl.cli import main
from djinnctl.explain import NAMED, told
from tests.support.scripted_daemon import Line, ScriptedDaemon

QUEUED = Why(
    state="queued",
    reason="it has had no row for 1.5 s: 3 sessions are served before it",
    figures={"waited_s": 1.5, "pages_needed": 12_000, "stage": "reading"},
    ahead=["s-2"],
    others_ahead=2,
)


def answer(line: Line) -> None:
    line.welcome()
    while (request := line.receive()) is not None:
        match request:
            case SetPriority(id=id, session="s-1", priority="batch"):
                line.send(Done(id=id))
            case SetPriority(id=id, session="s-1"):
                line.send(Failure(id=id, code="quota_exceeded", message="quotas.lab.highest_class is batch"))
            case ExplainSession(id=id, session="s-1"):
                line.send(WhyReply(id=id, why=QUEUED))
            case SetPriority(id=id) | ExplainSession(id=id):
                line.send(Failure(id=id, code="session_not_found", message="no such session"))
            case _:
                raise AssertionError(request)


@pytest.fixture
def address(daemon: ScriptedDaemon) -> str:
    return daemon.play(answer)


def run(address: str, *arguments: str) -> Result:
    return CliRunner(env={"NO_COLOR": "1"}).invoke(main, [*arguments, "--address", address])


def test_nice(address: str) -> None:
    result = run(address, "nice", "s-1", "batch")
    assert (result.exit_code, result.stdout) == (0, "s-1 is batch\n")
    assert json.loads(run(address, "nice", "s-1", "batch", "--json").stdout) == {"session": "s-1", "priority": "batch"}


def test_a_class_that_is_refused(address: str) -> None:
    result = run(address, "nice", "s-1", "interactive")
    assert (result.exit_code, result.stderr) == (1, "djinnctl: quotas.lab.highest_class is batch\n")
    assert run(address, "nice", "s-9", "batch").exit_code == 1
    assert run(address, "nice", "s-1", "urgent").exit_code == 2
    assert run(address, "nice", "s-1").exit_code == 2


def test_why(address: str) -> None:
    result = run(address, "why", "s-1")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "s-1 is queued: it has had no row for 1.5 s: 3 sessions are served before it",
        "  waited_s: 1.500",
        "  pages_needed: 12,000",
        "  stage: reading",
        "served before it: s-2, 2 of other users",
    ]
    assert run(address, "why", "s-9").exit_code == 1


def test_why_for_programs(address: str) -> None:
    assert json.loads(run(address, "why", "s-1", "--json").stdout) == {
        "state": "queued",
        "reason": QUEUED.reason,
        "figures": QUEUED.figures,
        "ahead": ["s-2"],
        "others_ahead": 2,
        "user_name": "",
    }


def test_a_long_line_is_cut_and_counted() -> None:
    many = Why(state="queued", reason="so", ahead=[f"s-{n}" for n in range(NAMED + 1200)])
    assert told("s", many).splitlines()[-1].endswith(f"s-{NAMED - 1}, 1,200 more of yours")
    assert told("s", Why(state="idle", reason="no call runs on it")) == "s is idle: no call runs on it"
    assert told("s", Why(state="idle", reason="none runs", user_name="ci")) == "s of ci is idle: none runs"
