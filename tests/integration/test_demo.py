"""`make demo`, after `make` has installed its dependencies. It uses the toy model; the real one comes from a package
index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_demo_shows_each_scene_and_leaves_nothing() -> None:
    found = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    ran = subprocess.run([sys.executable, "-m", "tools.demo", "--toy"], env=found, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    for words in (
        "a toy of 3.5 million parameters",
        "/v1/chat/completions",
        "tokens were computed; the rest was there",
        "went to the host in",
        "t = s.fork()",
        "SESSION USER MODEL",
        's.steer("blocks.2"',
        "nothing is left in shared memory",
        "djinnctl run MODEL",
    ):
        assert words in said, ran.stdout
    assert max(map(len, ran.stdout.splitlines())) < 80, "each line fits a terminal"
