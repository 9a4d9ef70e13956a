"""How many files a value passes. The bounds are what tools.walk counts today, and one file and three returns more.
The page has no bound for returns: copies of other pages to disk use numbers like its own. A token returns to each file
between the sampler and the steps twice: when its step is launched, and when it is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("walk", "most_files", "most_returns"), [("prompt", 50, 72), ("page", 19, None)])
def test_a_value_passes_no_more_files_than_before(walk: str, most_files: int, most_returns: int | None) -> None:
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    command = [sys.executable, "-m", "tools.walk", walk]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    counted = re.search(r"^(\d+) files, (\d+) returns$", ran.stdout, re.MULTILINE)
    assert counted is not None, ran.stdout + ran.stderr
    files, returns = map(int, counted.groups())
    assert files <= most_files, ran.stdout
    assert most_returns is None or returns <= most_returns, ran.stdout
