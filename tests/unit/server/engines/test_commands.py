from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from djinnd.server.engines.commands import python_module


@pytest.mark.parametrize("name", ["djinnd.engine", "djinnd.engine.fork_server"])
def test_modules_in_the_working_directory_are_not_imported(name: str, tmp_path: Path) -> None:
    for library in ("argparse", "click", "msgspec", "logging"):
        (tmp_path / f"{library}.py").write_text("raise SystemExit('of the working directory')\n")
    ended = subprocess.run(python_module(name, "--help"), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "--log-level" in ended.stdout
