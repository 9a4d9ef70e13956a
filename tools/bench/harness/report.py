"""What an experiment found and where: as JSON, and as a row of docs/results.md.

python -m tools.bench.harness.report FILE.json…     records results that were measured on another machine
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "docs" / "results.md"
FOLDER = ROOT / "docs" / "results"
PACKAGES = ("torch", "transformers", "triton")


class Report(msgspec.Struct, kw_only=True):
    experiment: str
    at: str  # UTC, to the second
    commit: str
    hardware: str
    software: str
    parameters: dict[str, Any]
    results: dict[str, Any]
    summary: str  # one line, for the table

    @property
    def name(self) -> str:
        """One a run: the file's name without its ending."""
        return f"{re.sub('[-:Z]', '', self.at)}-{self.experiment}"

    @property
    def row(self) -> str:
        when = f"[{self.at[:10]}](results/{self.name}.json)"
        return (
            f"| {when} | `{self.commit}` | {self.experiment} | {self.hardware} | {self.software} | {self.summary} |\n"
        )


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


def save(result: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def record(result: Report) -> None:
    """Into docs/results: the JSON file, and its row at the end of the table. Again does nothing."""
    if result.row not in TABLE.read_text():
        save(result, FOLDER / f"{result.name}.json")
        with TABLE.open("a") as table:
            table.write(result.row)


def keep(result: Report, path: Path | None, *, recorded: bool) -> None:
    """What a bench's `--json` and `--record` ask for."""
    if path:
        save(result, path)
    if recorded:
        record(result)


def commit() -> str:
    """Of the working tree, with `+` where it has changes that are not committed. Outside of a checkout, what
    $BENCH_COMMIT says, or "unknown"."""
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


if __name__ == "__main__":
    for file in sys.argv[1:]:
        record(msgspec.json.decode(Path(file).read_bytes(), type=Report))
