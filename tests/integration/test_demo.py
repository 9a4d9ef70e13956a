"""`make demo`, once `make` has installed what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.demo import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_shows_every_session_and_leaves_nothing() -> None:
    found = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    ran = subprocess.run([sys.executable, "-m", "tools.demo"], env=found, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for script in SCRIPTS:
        assert f"{script.name:<14}| " in ran.stdout
    assert "meanwhile: djinnctl status" in ran.stdout
    assert "nothing is left in shared memory" in ran.stdout
