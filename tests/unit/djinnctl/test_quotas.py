"""`djinnctl quota` against a scripted daemon."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from djinn_client import QuotaUse
from djinn_client.protocol import Failure, GetQuotas, Quotas
from djinnctl.cli import main
from tests.support.scripted_daemon import Line, ScriptedDaemon

MINE = QuotaUse(
    user=0,
    user_name="root",
    rule="",
    weight=1.0,
    highest_class="interactive",
    sessions=3,
    sessions_limit=1024,
    device_kv=0,
    device_kv_limit=None,
    host_kv=3 << 29,
    host_kv_limit=None,
    disk_kv=0,
    disk_kv_limit=None,
    tokens_per_s=0.0,
    tokens_per_s_limit=None,
)
LIMITED = replace(
    MINE,
    user=4_000_000_000,
    user_name="4000000000",
    rule="guests",
    weight=0.25,
    highest_class="batch",
    sessions=4,
    sessions_limit=4,
    device_kv_limit=8 << 30,
    host_kv=0,
    tokens_per_s=123.456,
    tokens_per_s_limit=500.0,
)


def answer(line: Line) -> None:
    line.welcome()
    while (request := line.receive()) is not None:
        assert isinstance(request, GetQuotas)
        line.send(Quotas(id=request.id, quotas=[MINE, LIMITED] if request.all else [MINE]))


def run(*arguments: str) -> Result:
    return CliRunner(env={"DJINND_ADDRESS": "", "NO_COLOR": "1", "COLUMNS": "80"}).invoke(main, ["quota", *arguments])


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


HEAD = "USER RULE UP TO CLASS WEIGHT OF USED LIMIT"
OWN = ["root - interactive 1 sessions 3 1024", "host_kv 1.5 GiB none"]


def test_quota_shows_the_caller_s_own_use(daemon: ScriptedDaemon) -> None:
    assert lines(run("--address", daemon.play(answer))) == [HEAD, *OWN]


def test_quota_all_shows_every_user_s_use(daemon: ScriptedDaemon) -> None:
    assert lines(run("--all", "--address", daemon.play(answer))) == [
        HEAD,
        *OWN,
        "4000000000 guests batch 0.25 sessions 4 4",
        "device_kv 0 B 8.0 GiB",
        "tokens_per_s 123.5 500",
    ]


@pytest.mark.parametrize("all_", [True, False])
def test_quotas_are_printed_as_json(daemon: ScriptedDaemon, all_: bool) -> None:
    address = daemon.play(answer)
    shown = json.loads(run("--json", *(["--all"] if all_ else []), "--address", address).stdout)
    assert [use["rule"] for use in shown] == (["", "guests"] if all_ else [""])
    assert shown[-1]["device_kv_limit"] == (8 << 30 if all_ else None)


def test_quota_all_is_refused_to_other_users(daemon: ScriptedDaemon) -> None:
    def refuse(line: Line) -> None:
        line.welcome()
        request = line.expect(GetQuotas)
        line.send(Failure(id=request.id, code="not_permitted", message="only an administrator may"))
        line.expect_hang_up()

    refused = run("--all", "--address", daemon.play(refuse))
    assert (refused.exit_code, refused.stderr) == (1, "djinnctl: only an administrator may\n")
