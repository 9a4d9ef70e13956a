from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = Path(__file__).with_name("interpreted_fetch.py")


@pytest.mark.timeout(300)
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", str(CASES)]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
