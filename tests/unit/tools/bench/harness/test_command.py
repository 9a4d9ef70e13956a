from __future__ import annotations

from pathlib import Path

import msgspec
from click.testing import CliRunner

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.command import Result, given
from tools.bench.harness.report import Report


@command.bench("steps", "How long a step takes.\n\nMore about it.")
@command.device
@command.rounds(7)
def measure(device: str, rounds: int) -> Result:
    if device == "none":
        raise djinn.OutOfMemory("the model needs 4 GiB, the budget is 1 GiB")
    return Result({"rounds": rounds}, {"seconds": 0.5}, "half a second", ["shown", device])


def test_a_bench_shows_its_result_and_writes_its_report(tmp_path: Path) -> None:
    ran = CliRunner().invoke(measure, ["--device=cpu", f"--json={tmp_path / 'found.json'}"])
    assert ran.exit_code == 0 and ran.stdout == "shown\ncpu\n"
    report = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Report)
    assert (report.experiment, report.parameters, report.results) == ("steps", {"rounds": 7}, {"seconds": 0.5})


def test_an_error_of_the_daemon_ends_a_bench_with_its_message() -> None:
    ran = CliRunner().invoke(measure, ["--device=none"])
    assert ran.exit_code == 1 and "the model needs 4 GiB" in ran.stderr


def test_the_help_is_the_first_paragraph_and_all_options() -> None:
    told = CliRunner().invoke(measure, ["--help"]).stdout
    assert "How long a step takes." in told and "More" not in told
    assert told.index("--device") < told.index("--rounds") < told.index("--json") < told.index("--record")


def test_options_that_are_not_given_are_left_out() -> None:
    assert given(kv=None, host_kv="1GiB", keep_host=False) == {"host_kv": "1GiB", "keep_host": False}
