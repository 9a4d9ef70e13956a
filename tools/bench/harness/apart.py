"""Measurements in a process of their own, so that the bench's process holds no device memory."""

from __future__ import annotations

import subprocess
import sys

from tools.bench.harness.report import ROOT


def output_of(module: str, *arguments: str) -> bytes:
    """Runs `python -m tools.bench.MODULE` to its end. Returns its standard output."""
    command = [sys.executable, "-m", f"tools.bench.{module}", *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
