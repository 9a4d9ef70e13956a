from __future__ import annotations

from pathlib import Path

import click
import pytest

from tools.bench.loads.load import Group, Load
from tools.bench.loads.process import LoadProcess

LOAD = Load(seconds=1.0, groups={"batch": Group(priority="batch", sessions=1, context=(1, 1), answer=(1, 1))})


def test_an_error_of_the_loads_process_is_raised_and_the_process_is_gone(tmp_path: Path) -> None:
    process = LoadProcess(f"{tmp_path}/nobody.sock", "m", 10, LOAD)
    with pytest.raises(click.ClickException, match=r"^beside: .*nobody\.sock"), process:
        raise AssertionError("it has not begun")
    pid = process._process.pid
    assert pid is not None and not Path(f"/proc/{pid}/stat").exists()
