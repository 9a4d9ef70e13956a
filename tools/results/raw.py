"""A raw file of docs/results: one run of a bench, with the machine, the versions and the commit it belongs to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "results"


class Report(msgspec.Struct, kw_only=True):
    experiment: str
    at: str  # UTC, to the second
    commit: str
    hardware: str
    software: str
    parameters: dict[str, Any]
    results: dict[str, Any]
    summary: str  # one line, as the bench prints it

    @property
    def name(self) -> str:
        """The file's name without its ending; it is different for each run."""
        return f"{re.sub('[-:Z]', '', self.at)}-{self.experiment}"

    @property
    def card(self) -> str:
        """The GPU model, or "CPU": results of one card are compared with each other."""
        found = re.search(r"NVIDIA [^,]+?(?= with driver|,)", self.hardware)
        return found[0] if found else "CPU"

    @property
    def machine(self) -> str:
        """One of the GPUs, the cores and the host's memory, without driver and processor."""
        cores_and_memory = ", ".join(self.hardware.split(", ")[-2:])
        return f"{self.card}, {cores_and_memory}"


def read(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)


def read_all(folder: Path) -> list[Report]:
    return [read(path) for path in sorted(folder.glob("*.json"))]


def save(result: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
