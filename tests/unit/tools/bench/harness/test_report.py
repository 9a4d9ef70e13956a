from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tools.bench.harness import report as module
from tools.bench.harness.report import Report, report, save


def found() -> Report:
    return report("ipc", {"calls": 10}, {"p50_us": 99.5}, "p50 100 µs")


def test_a_saved_report_is_the_same_when_read(tmp_path: Path) -> None:
    result = found()
    save(result, tmp_path / "elsewhere" / "ipc.json")
    assert msgspec.json.decode((tmp_path / "elsewhere" / "ipc.json").read_bytes(), type=Report) == result


def test_a_report_names_its_machine_versions_and_commit() -> None:
    result = found()
    assert "cores" in result.hardware
    assert re.search(r"Python 3\.\d+\.\d+.*, torch \d", result.software)
    assert re.fullmatch(r"[0-9a-f]{10,}\+?|unknown", result.commit)


def test_outside_of_a_checkout_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.commit() == "unknown"
