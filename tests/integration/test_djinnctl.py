"""djinnctl with a real daemon: its output for people and for programs, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import ROOT, Daemon, clean_environ

DONE, FAILED, UNREACHABLE = 0, 1, 2

Djinnctl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def private() -> Iterator[Daemon]:
    """A daemon for tests that load and unload models."""
    with DaemonStarter() as start:
        yield start(errors=["model_failed"])


@pytest.fixture
def djinnctl(private: Daemon) -> Djinnctl:
    def call(*arguments: str, code: int = DONE, address: str = private.address) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "djinnctl", *arguments]
        environ = clean_environ() | {"DJINND_ADDRESS": address, "NO_COLOR": "1", "COLUMNS": "80"}
        ended = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ended.returncode == code, ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr
        assert "\x1b" not in ended.stdout
        return ended

    return call


@pytest.fixture
def as_json(djinnctl: Djinnctl) -> Callable[..., Any]:
    return lambda *arguments, **options: json.loads(djinnctl(*arguments, "--json", **options).stdout)


def test_a_model_is_planned_loaded_listed_and_unloaded(
    djinnctl: Djinnctl, as_json: Callable[..., Any], private: Daemon
) -> None:
    def state() -> str:
        return {model["name"]: model["state"] for model in as_json("models")}[MODEL]

    djinnctl("unload", MODEL)
    assert state() == "available"
    assert MODEL in djinnctl("load", MODEL, "--kv", "32MiB").stdout
    assert state() == "ready"
    loaded = as_json("load", MODEL)
    assert (loaded["name"], loaded["state"], loaded["kv_bytes"]) == (MODEL, "ready", 32 << 20)
    assert "ready" in djinnctl("models").stdout
    with djinn.Session(MODEL, address=private.address):
        assert "1 sessions use djinn-tiny" in djinnctl("unload", MODEL, code=FAILED).stderr
        assert as_json("unload", MODEL, "--force") == {"unloaded": MODEL}
    assert state() == "available"


def test_a_model_larger_than_its_budget(djinnctl: Djinnctl, as_json: Callable[..., Any], private: Daemon) -> None:
    """`load` does what `plan` says, and the budget changes under a session that keeps its tokens."""
    djinnctl("unload", MODEL)
    placing = ("--resident", "2", "--kv", "32MiB")
    plan = as_json("plan", MODEL, *placing)
    assert (plan["blocks_plain"] + plan["blocks_packed"], plan["blocks_streamed"]) == (2, plan["blocks"] - 2)
    assert plan["budget_bytes"] == 1 << 30 and plan["streamed_bytes"] > 0 and plan["step_s"].keys() == {"1", "16"}
    assert f"{plan['blocks_streamed']} streamed" in djinnctl("plan", MODEL, *placing).stdout
    loaded = as_json("load", MODEL, *placing)
    for name in ("blocks", "blocks_plain", "blocks_packed", "blocks_streamed", "streamed_bytes", "kv_bytes"):
        assert loaded[name] == plan[name], name
    assert "unload it first, to change the placement" in djinnctl("load", MODEL, "--resident", "3", code=FAILED).stderr
    try:
        with djinn.Session(MODEL, address=private.address) as s:
            before = s.generate("def f(", max_tokens=8, ignore_eos=True).token_ids
            assert "1.0 MiB is too small" in djinnctl("budget", "1MiB", code=FAILED).stderr
            changed = as_json("budget", "700MiB")
            assert changed["budget_bytes"] == 700 << 20 >= changed["used_bytes"]
            assert as_json("budget")[0]["budget_bytes"] == 700 << 20
            assert as_json("status", "--check")["integrity"] == []
            s.truncate(len(s.token_ids()) - len(before))
            assert s.generate(max_tokens=8, ignore_eos=True).token_ids == before
    finally:
        djinnctl("budget", "1GiB")
        djinnctl("unload", MODEL)


def test_invalid_plans_and_budgets_are_refused(djinnctl: Djinnctl) -> None:
    assert "no model is called" in djinnctl("plan", "nonesuch", code=FAILED).stderr
    assert "resident is 300" in djinnctl("plan", MODEL, "--resident", "300", code=FAILED).stderr
    assert "MiB" in djinnctl("plan", MODEL, "--memory", "1MiB", code=FAILED).stderr
    assert "give one of them" in djinnctl("plan", MODEL, "--slots", "3", "--ring-gb", "1", code=FAILED).stderr
    assert "1 byte or more" in djinnctl("budget", "0B", code=FAILED).stderr
    assert "1.0 GiB" in djinnctl("budget").stdout


def test_sessions(djinnctl: Djinnctl, as_json: Callable[..., Any], private: Daemon) -> None:
    with djinn.Session(MODEL, priority="batch", address=private.address) as s:
        s.generate("x = ", max_tokens=8, ignore_eos=True)
        (listed,) = [info for info in as_json("ps") if info["id"] == s.id]
        assert (listed["model"], listed["priority"], listed["state"]) == (MODEL, "batch", "idle")
        assert listed["tokens"] == len(s.token_ids())
        assert s.id in djinnctl("ps").stdout
        fork = djinnctl("fork", s.id).stdout.strip()
        (listed,) = [info for info in as_json("ps") if info["id"] == fork]
        assert (listed["tokens"], listed["priority"], listed["state"]) == (len(s.token_ids()), "batch", "detached")
        assert "no session" in djinnctl("fork", "nonesuch", code=FAILED).stderr
        djinnctl("close", fork)
        assert as_json("close", s.id, "nonesuch", code=FAILED) == {"closed": [s.id], "missing": ["nonesuch"]}
        assert s.id not in djinnctl("ps").stdout
        assert "no session" in djinnctl("close", s.id, code=FAILED).stdout


def test_status(djinnctl: Djinnctl, as_json: Callable[..., Any], private: Daemon) -> None:
    with djinn.Session(MODEL, address=private.address) as s:
        s.generate("x = ", max_tokens=8, ignore_eos=True)
        status = as_json("status", "--check")
        told = djinn.status(address=private.address)
    assert status.keys() == set(told.__struct_fields__) - {"id"}
    assert (status["state"], status["pid"], status["integrity"]) == ("ready", private.pid, [])
    assert status["sessions"]["interactive"] == 1
    assert status["devices"][0]["budget_bytes"] == 1 << 30
    shown = djinnctl("status", "--check").stdout
    for word in ("ready", str(private.pid), "cpu", MODEL, "1.0 GiB", "check: consistent"):
        assert word in shown


def test_errors_of_the_daemon(djinnctl: Djinnctl) -> None:
    assert "djinn-tiny" in djinnctl("load", "djinn-tin", code=FAILED).stderr  # did you mean
    assert "/nowhere" in djinnctl("load", "/nowhere", code=FAILED).stderr


def test_no_daemon_and_wrong_usage(djinnctl: Djinnctl, as_json: Callable[..., Any], private: Daemon) -> None:
    nowhere = str(private.folder / "nobody")
    commands = [["status"], ["ps"], ["models"], ["load", MODEL], ["plan", MODEL], ["budget"], ["unload", MODEL]]
    for command in (*commands, ["close", "x"]):
        assert "no daemon at" in djinnctl(*command, code=UNREACHABLE, address=nowhere).stderr
    djinnctl("status", "--nonesuch", code=UNREACHABLE)
    djinnctl("load", code=UNREACHABLE)
    djinnctl("load", MODEL, "--kv", "some", code=UNREACHABLE)


def test_version(djinnctl: Djinnctl, as_json: Callable[..., Any], private: Daemon) -> None:
    versions = as_json("version")
    assert versions["djinnd"] == versions["djinnctl"] == djinn.__version__
    assert djinn.__version__ in djinnctl("version").stdout
    assert as_json("version", address=str(private.folder / "nobody"))["djinnd"] is None
