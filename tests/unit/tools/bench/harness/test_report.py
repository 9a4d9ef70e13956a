from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tools.bench.harness import report as module
from tools.bench.harness.report import Report, record, report, save

HEAD = "# Results\n\n| date | commit |\n|---|---|\n"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "TABLE", tmp_path / "results.md")
    monkeypatch.setattr(module, "FOLDER", tmp_path / "results")
    (tmp_path / "results.md").write_text(HEAD)
    return tmp_path


def found() -> Report:
    return report("ipc", {"calls": 10}, {"p50_us": 99.5}, "p50 100 µs")


def test_a_recorded_result_is_a_row_that_links_to_all_of_it(results: Path) -> None:
    record(found())
    row = (results / "results.md").read_text().removeprefix(HEAD)
    assert row.endswith("| p50 100 µs |\n")
    link = re.search(r"\((results/.+\.json)\)", row)
    assert link
    assert msgspec.json.decode((results / link[1]).read_bytes())["results"] == {"p50_us": 99.5}


def test_recorded_again_it_stays_one_row(results: Path) -> None:
    once = found()
    record(once)
    record(once)
    assert (results / "results.md").read_text() == HEAD + once.row


def test_what_was_saved_elsewhere_is_the_same_when_read(tmp_path: Path) -> None:
    result = found()
    save(result, tmp_path / "elsewhere" / "ipc.json")
    assert msgspec.json.decode((tmp_path / "elsewhere" / "ipc.json").read_bytes(), type=Report) == result


def test_a_result_says_where_it_belongs() -> None:
    result = found()
    assert "cores" in result.hardware
    assert re.search(r"Python 3\.\d+\.\d+.*, torch \d", result.software)
    assert re.fullmatch(r"[0-9a-f]{10,}\+?|unknown", result.commit)


def test_outside_of_a_checkout_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.commit() == "unknown"
