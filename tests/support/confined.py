"""Confined processes: the machine's abilities that their tests need, and the children of a daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from djinnd.confinement import landlock, seccomp
from tests.support.daemon import Daemon, descendants_of, is_alive

_LACKING = landlock.missing() or seccomp.missing()

confined = pytest.mark.skipif(bool(_LACKING), reason=f"this machine lacks {_LACKING}")


def intervention_processes(daemon: Daemon) -> list[int]:
    return _running("djinnd.functions", daemon.pid)


def text_workers(parent: int) -> list[int]:
    return _running("djinnd.text_worker", parent)


def _running(module: str, parent: int) -> list[int]:
    return [pid for pid in descendants_of(parent) if is_alive(pid) and module in _command(pid)]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
