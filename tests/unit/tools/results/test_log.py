"""The log of experiments has one form, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.results.raw import ROOT

LOG = ROOT / "docs" / "log"
MONTHS = sorted(LOG.glob("20*.md"))
MOST_LINES = 10


def entries(path: Path) -> list[str]:
    return re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("path", MONTHS, ids=lambda path: str(path.stem))
def test_every_entry_has_a_question_an_answer_and_a_consequence_in_ten_lines(path: Path) -> None:
    for entry in entries(path):
        title, *text = filter(None, entry.splitlines())
        assert re.fullmatch(rf"{path.stem}-\d\d · .+\?", title), title
        assert [line.split(":")[0] for line in text if line.startswith(("Answer:", "Consequence:"))] == [
            "Answer",
            "Consequence",
        ], title
        assert len(text) <= MOST_LINES, f"{title}: {len(text)} lines"


@pytest.mark.parametrize("path", MONTHS, ids=lambda path: str(path.stem))
def test_the_newest_entry_is_on_top(path: Path) -> None:
    dates = [entry.split(" ")[0] for entry in entries(path)]
    assert dates == sorted(dates, reverse=True)


def test_the_index_links_to_every_month() -> None:
    assert [month.name for month in MONTHS] == re.findall(r"\((20[\d-]+\.md)\)", (LOG / "README.md").read_text())


@pytest.mark.parametrize("path", [*MONTHS, LOG / "README.md", ROOT / "docs" / "results.md"], ids=lambda path: path.name)
def test_every_link_leads_to_a_file(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
