"""djinnctl with a daemon of another machine: each command, with a token in a file, away from the daemon's files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import djinn_client as djinn
from djinnctl.cli import main
from tests.conftest import MODEL
from tests.support.daemon import Daemon, clean_environ
from tests.support.remote import RemoteGateway, daemon_fixture, gateway_fixture, token_of

Djinnctl = Callable[..., subprocess.CompletedProcess[str]]

daemon = daemon_fixture()
gateway = gateway_fixture({"grace": "3s"})


@pytest.fixture
def token_file(daemon: Daemon, tmp_path: Path) -> Callable[[str], Path]:
    """The file with a token of this user. Only root is a Unix user."""

    def write(user: str) -> Path:
        file = tmp_path / user
        if not file.exists():
            file.touch(0o600)
            file.write_text(token_of(daemon, f"{tmp_path.name}-{user}", user if user == "root" else "") + "\n")
        return file

    return write


@pytest.fixture
def djinnctl(gateway: RemoteGateway, token_file: Callable[[str], Path], tmp_path: Path) -> Djinnctl:
    pinned = f"djinns://127.0.0.1:{gateway.port}#{gateway.fingerprint}"

    def call(*arguments: str, user: str = "root", code: int = 0, address: str = "") -> subprocess.CompletedProcess[str]:
        """`user` has the token."""
        there = ["--address", address or pinned, "--token-file", token_file(user)]
        command = [sys.executable, "-m", "djinnctl", *arguments, *there]
        environ = clean_environ() | {"XDG_CONFIG_HOME": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "80"}
        ended = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert ended.returncode == code and "Traceback" not in ended.stderr, ended.stdout + ended.stderr
        return ended

    return call


def test_a_token_file_lets_djinnctl_in_and_others_may_not_read_it(djinnctl: Djinnctl, tmp_path: Path) -> None:
    assert json.loads(djinnctl("status", "--json").stdout)["state"] == "ready"
    (tmp_path / "root").chmod(0o644)
    assert "chmod 600" in " ".join(djinnctl("status", code=2).stderr.split())


@pytest.mark.long
def test_each_command_serves_another_machine(
    djinnctl: Djinnctl, gateway: RemoteGateway, token_file: Callable[[str], Path], tmp_path: Path
) -> None:
    def as_json(*arguments: str) -> Any:
        return json.loads(djinnctl(*arguments, "--json").stdout)

    assert as_json("version")["djinnd"]
    with djinn.Session(MODEL, address=gateway.address_for(token_file("root").read_text().strip())) as s:
        s.generate([1 + token % 90 for token in range(300)], max_tokens=1)
        fork = as_json("fork", s.id)["session"]
        assert {info["id"] for info in as_json("ps")} == {s.id, fork}
        as_json("pause", s.id)
        assert "paused" in djinnctl("why", s.id).stdout
        as_json("resume", s.id)
        as_json("nice", s.id, "batch")
        prefix = as_json("prefix", "publish", s.id)["id"]
        assert prefix in djinnctl("prefix", "list").stdout
        djinnctl("prefix", "withdraw", prefix)
        as_json("trace", "--seconds", "0.1", "--output", "here.json")
        assert (tmp_path / "here.json").is_file()
        assert as_json("close", s.id, fork)["closed"] == [s.id, fork]
    for command in (["top", "--once"], ["quota", "--all"], ["models"], ["plan", MODEL], ["budget"], ["token", "list"]):
        as_json(*command)
    assert as_json("free", "64MiB")["budget_bytes"] < as_json("budget", "1GiB")["budget_bytes"]
    added = as_json("token", "add", "other")
    djinnctl("token", "revoke", added["info"]["name"])
    djinnctl("unload", MODEL)
    assert as_json("adapters", "list") == []
    (tmp_path / "turns.jinja").write_text("{{ messages[0].content }}")
    assert as_json("load", MODEL, "--chat-template", "turns.jinja")["state"] == "ready"
    assert as_json("run", MODEL, "def f(", "--set", "max_tokens=4")["usage"]["generated_tokens"] == 4
    assert as_json("restart")["state"] == "ready"


@pytest.mark.long
def test_doctor_says_what_is_wrong_between_here_and_there(
    djinnctl: Djinnctl, gateway: RemoteGateway, tmp_path: Path
) -> None:
    found = json.loads(djinnctl("doctor", "--json").stdout)
    assert {result["state"] for result in found} == {"ok"}
    assert [result["subject"] for result in found][-4:] == ["connection", "certificate", "token", "daemon"]
    (tmp_path / "nobody").touch(0o600)
    (tmp_path / "nobody").write_text("djn_unknown")
    assert "not valid" in djinnctl("doctor", user="nobody", code=1).stdout
    unpinned = djinnctl("doctor", code=1, address=f"djinns://127.0.0.1:{gateway.port}")
    assert "djinnctl trust" in unpinned.stdout
    assert "firewall" in djinnctl("doctor", code=1, address="djinns://127.0.0.1:1").stdout
    assert "on the daemon's machine" in djinnctl("doctor", "--fix", code=1).stderr


def test_every_command_is_among_those_that_serve_another_machine() -> None:
    """A new command needs its line in the test above, or here where it concerns this machine only."""
    here = {"pull", "trust", "completion"}
    there = {"status", "version", "fork", "ps", "pause", "why", "resume", "nice", "prefix", "trace", "close", "top"}
    there |= {"quota", "models", "plan", "budget", "token", "run", "free", "unload", "load", "restart"}
    there |= {"doctor", "adapters"}
    assert main.commands.keys() == here | there


@pytest.mark.long
def test_a_plain_user_is_no_administrator_and_a_folder_of_this_machine_is_refused(
    djinnctl: Djinnctl, tmp_path: Path
) -> None:
    for command in ("budget 1GiB", "token list", "restart", "trace", "prefix list", "quota --all"):
        assert "administrator" in djinnctl(*command.split(), user="ana", code=1).stderr, command
    (tmp_path / "model").mkdir()
    told = djinnctl("load", "./model", code=1).stderr
    assert "is a folder of this machine" in told and "share_model" in told
