"""tests/support/workers.py: no test is lost, whatever it does to its worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "test_good.py": "def test_passes(tmp_path): (tmp_path / 'file').touch()",
    "test_bad.py": "def test_fails():\n    print('said')\n    assert 1 == 2",
    "test_ends.py": "import os\ndef test_ends(): os._exit(0)\ndef test_is_lost(): pass",
}


@pytest.mark.long
def test_a_worker_that_ends_fails_the_run_and_others_go_on(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    options = ["-p", "tests.support.workers", "-p", "no:cacheprovider", "-p", "no:randomly", "--workers", "2"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    assert "2 failed, 1 passed" in run.stdout
    assert "said" in run.stdout and "the worker ended with exit status 0" in run.stdout
