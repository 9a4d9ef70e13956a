from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels

FOLDER = Path(__file__).with_name("interpreted")
CASES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
HALVES = [CASES[:8], CASES[8:]]  # each takes half of the time and is a process of its own
APART = ("coded", "experts", "kernels", "states")  # the longest files of the long tests
GROUPS = [[each] for each in APART] + [[case for case in CASES if case not in APART]]


def runs(which: str, groups: list[list[str]], *marks: pytest.MarkDecorator) -> list[ParameterSet]:
    """Parameters for the tests that are `which`, of each group of files."""
    return [
        pytest.param(which, each, marks=[pytest.mark.xdist_group(f"interpreted {each[0]}"), *marks], id=" ".join(each))
        for each in groups
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("which", "cases"), [*runs("not long", HALVES), *runs("long", GROUPS, pytest.mark.long)])
def test_kernels_are_right_under_the_interpreter(which: str, cases: list[str]) -> None:
    files = [str(FOLDER / f"{case}.py") for case in cases]
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.support.patched_once"]
    command = [sys.executable, "-m", "pytest", *options, "-m", which, *files]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
