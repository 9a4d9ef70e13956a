from __future__ import annotations

from pathlib import Path

import pytest

from tools import prose
from tools.prose import Passage, check_file, check_passage


def faults(text: str, is_docstring: bool = True) -> list[str]:
    return [fault for fault, _ in check_passage(Passage(1, text, is_docstring))]


@pytest.mark.parametrize(
    "text",
    [
        "A session that must be evicted is recomputed later if keeping its pages would evict pages needed sooner.",
        "True if an earlier engine process wrote this session's KV.",
        "What does it cost? Two copies.",
        "Asks the client which session it means, and says `who` was asked.",
        "Stops a session whose client is gone.",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Of the process.", "a docstring that continues the name"),
        ("Evicts. Who has to make room is computed anew.", "a relative clause as the subject"),
        ("What fails gives all back.", "a relative clause as the subject"),
        ("The KV of who decodes.", "a relative clause without a noun"),
        ("Pages that nobody has yet.", "a pronoun for a person, where a session or a request is meant"),
        ("Word " * 36 + "end.", "a sentence of 37 words (at most 35)"),
    ],
)
def test_the_dialect_is_found(text: str, fault: str) -> None:
    assert faults(text) == [fault]


def test_a_comment_may_begin_with_any_word() -> None:
    assert faults("Of the process", is_docstring=False) == []


def test_a_finding_has_the_line_of_its_docstring_comment_or_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    path = tmp_path / "test_it.py"
    lines = ['"""A page."""', "", "", "def test_but_not_this():", '    """Of it."""', "    x = 1  # who knows"]
    path.write_text("\n".join([*lines, "    # one line", "    # and who else", ""]))
    assert [(finding.line, finding.fault) for finding in check_file(path)] == [
        (5, "a docstring that continues the name"),
        (6, "a relative clause as the subject"),
        (7, "a relative clause without a noun"),
        (4, "a test's name that is no statement"),
    ]


def test_code_and_tables_of_a_page_are_not_prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text("# A page\n\n```\nwho is this\n```\n\n| who | nobody |\n\nWho reads this finds one fault.\n")
    assert [(finding.line, finding.fault) for finding in check_file(path)] == [(9, "a relative clause as the subject")]
