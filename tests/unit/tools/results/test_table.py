"""docs/results.md and docs/results, and the rules by which runs supersede each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tools.results.experiments import EXPERIMENTS
from tools.results.raw import FOLDER, Report, read_all
from tools.results.table import add, latest, page, table_of

MOST_ROWS = 40
GPU = "NVIDIA H200 with driver 580.1, Intel Xeon, 16 cores, 126 GiB"


def run(at: str, hardware: str = GPU, **parameters: Any) -> Report:
    return Report(
        experiment="budget",
        at=f"2026-11-{at}T10:00:00Z",
        commit="abc",
        hardware=hardware,
        software="Python",
        parameters={"model": "m13", "sessions": 16, **parameters},
        results={
            "changes": [{"budget_bytes": 20 << 30, "seconds": 0.4}, {"budget_bytes": 40 << 30, "seconds": 0.5}],
            "sessions_with_the_same_tokens": 16,
        },
        summary="",
    )


def test_the_results_page_is_what_the_raw_files_give() -> None:
    assert table_of(FOLDER).read_text() == page(read_all(FOLDER)), "run `python -m tools.results`"


def test_every_raw_file_has_a_row_and_every_row_its_raw_file() -> None:
    rows = re.findall(r"^\| \[[\d-]+\]\(results/([^)]+)\)", table_of(FOLDER).read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(path.name for path in FOLDER.iterdir())
    assert len(rows) <= MOST_ROWS


def test_every_recorded_experiment_has_words() -> None:
    assert {each.experiment for each in read_all(FOLDER)} <= set(EXPERIMENTS)


def test_a_later_run_on_the_same_card_supersedes_an_earlier_one() -> None:
    old, new = run("20"), run("21", hardware=GPU.replace("16 cores", "32 cores"))
    assert latest([new, old]) == [new]


@pytest.mark.parametrize("other", [{"hardware": "AMD EPYC, 2 cores, 24 GiB"}, {"model": "djinn-tiny"}])
def test_a_run_on_another_card_or_of_another_model_has_a_row_of_its_own(other: dict[str, Any]) -> None:
    assert len(latest([run("20"), run("21", **other)])) == 2


def test_adding_a_run_deletes_the_run_that_it_supersedes(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    for day in ("20", "21"):
        add(run(day), folder)
    assert [path.name for path in folder.iterdir()] == ["20261121T100000-budget.json"]
    assert "40 to 20 GiB in 0.40 s and back in 0.50 s; 16 of 16" in table_of(folder).read_text()


def test_a_run_of_an_experiment_without_words_shows_its_summary(tmp_path: Path) -> None:
    result = run("20")
    result.experiment, result.summary = "new", "42 ms | at most"
    add(result, tmp_path / "results")
    assert "| 42 ms / at most |" in (tmp_path / "results.md").read_text()
