"""The report of an experiment, with the machine, the versions and the commit it belongs to."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.results.raw import ROOT, Report, save
from tools.results.table import add

__all__ = ["ROOT", "Report", "keep", "record", "report", "save"]

PACKAGES = ("torch", "transformers", "triton")


def report(experiment: str, parameters: dict[str, Any], results: dict[str, Any], summary: str) -> Report:
    """Results with the machine, the versions and the commit that they belong to."""
    return Report(
        experiment=experiment,
        at=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=commit(),
        hardware=hardware(),
        software=software(),
        parameters=parameters,
        results=results,
        summary=summary,
    )


def record(result: Report) -> None:
    """Stores the run in docs/results and writes docs/results.md; an earlier run of the same experiment is deleted."""
    add(result)


def keep(result: Report, path: Path | None, *, recorded: bool) -> None:
    """Serves a bench's options `--json` and `--record`."""
    if path:
        save(result, path)
    if recorded:
        record(result)


def commit() -> str:
    """The working tree's commit, with `+` where it has changes that are not committed. Outside of a checkout it is
    $BENCH_COMMIT, or "unknown"."""
    if shutil.which("git") is None:
        return os.environ.get("BENCH_COMMIT", "unknown")
    head, changes = (
        subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
        for arguments in (("rev-parse", "--short=10", "HEAD"), ("status", "--porcelain"))
    )
    return (
        head.stdout.strip() + "+" * bool(changes.stdout)
        if head.returncode == 0
        else os.environ.get("BENCH_COMMIT", "unknown")
    )


def hardware() -> str:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return ", ".join([*_gpus(), _processor(), f"{os.cpu_count()} cores", f"{gib:.0f} GiB"])


def software() -> str:
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return (
        [line.replace(", ", " with driver ") for line in answer.stdout.splitlines()] if answer.returncode == 0 else []
    )


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()
