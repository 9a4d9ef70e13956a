"""`djinnctl token` against a scripted daemon."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from djinn_client import TokenInfo
from djinn_client.protocol import (
    AddToken,
    Done,
    Failure,
    Hello,
    ListTokens,
    RevokeToken,
    TokenAdded,
    TokensListed,
)
from djinnctl.cli import main
from tests.support.scripted_daemon import Line, ScriptedDaemon

CI = TokenInfo(
    name="ci", user=1 << 33, user_name="ci", highest_class="batch", created=1.75e9, expires=1.76e9, used=None
)
LAPTOP = TokenInfo(
    name="alice-laptop", user=1000, user_name="alice", highest_class=None, created=1.75e9, expires=None, used=1.755e9
)


def run(*arguments: str, **environ: str) -> Result:
    runner = CliRunner(env={"DJINND_ADDRESS": "", "NO_COLOR": "1", "COLUMNS": "80", "TZ": "UTC"} | environ)
    return runner.invoke(main, ["token", *arguments])


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], AddToken(id=2, name="ci")),
        (["--user", "alice"], AddToken(id=2, name="ci", user="alice")),
        (["--class", "batch", "--expires", "90d"], AddToken(id=2, name="ci", highest_class="batch", expires_s=7776e3)),
    ],
)
def test_add_prints_the_token_alone(daemon: ScriptedDaemon, arguments: list[str], asked: AddToken) -> None:
    def add(line: Line) -> None:
        line.welcome()
        assert line.expect(AddToken) == asked
        line.send(TokenAdded(id=2, token="djn_x", info=CI))

    result = run("add", "ci", *arguments, "--address", daemon.play(add))
    assert (result.exit_code, result.stdout) == (0, "djn_x\n")


def test_token_list_shows_users_classes_and_times(daemon: ScriptedDaemon) -> None:
    def tell(line: Line) -> None:
        line.welcome()
        while (request := line.receive()) is not None:
            assert isinstance(request, ListTokens)
            line.send(TokensListed(id=request.id, tokens=[CI, LAPTOP]))

    address = daemon.play(tell)
    head, *rows = run("list", "--address", address).stdout.splitlines()
    assert head.split("  ")[0] == "TOKEN" and max(map(len, rows)) <= 80
    assert [row.split()[:3] for row in rows] == [["alice-laptop", "alice", "any"], ["ci", "ci", "batch"]]
    assert [row.count("never") for row in rows] == [1, 1]
    assert [info["name"] for info in json.loads(run("list", "--json", "--address", address).stdout)] == [
        "ci",
        "alice-laptop",
    ]


def test_revoke(daemon: ScriptedDaemon) -> None:
    def revoke(line: Line) -> None:
        line.welcome()
        line.send(Done(id=line.expect(RevokeToken).id))

    assert run("revoke", "ci", "--address", daemon.play(revoke)).stdout == "ci is revoked\n"


def test_a_token_in_the_environment_is_shown(daemon: ScriptedDaemon) -> None:
    def refuse(line: Line) -> None:
        hello = line.expect(Hello)
        assert hello.token == "djn_x"
        line.send(Failure(id=hello.id, code="not_authenticated", message="this token is not valid"))

    result = run("list", "--address", daemon.play(refuse), DJINND_TOKEN=" djn_x\n")
    assert (result.exit_code, result.stderr) == (1, "djinnctl: this token is not valid\n")


@pytest.mark.parametrize("expires", ["90", "soon", "-1d"])
def test_times_that_are_none(expires: str) -> None:
    assert run("add", "ci", "--expires", expires).exit_code == 2


def test_a_token_that_ends_at_once_is_no_token_that_never_ends() -> None:
    done = CliRunner().invoke(main, ["token", "add", "ci", "--expires", "0"])
    assert done.exit_code == 2 and "'0' is no time at all; leave the option out for the default" in done.output
