from __future__ import annotations

import pytest

from tools.demo import page


def said(capsys: pytest.CaptureFixture[str], *pieces: str) -> list[str]:
    answer = page.Said()
    for piece in pieces:
        answer.add(piece)
    answer.end()
    return capsys.readouterr().out.splitlines()


def test_an_answer_is_wrapped_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "The sea is ", "va", "st.\n\nIt ", "word " * 30)
    assert lines[0] == "    | The sea is vast."
    assert lines[1].startswith("    | It word word")
    assert len(lines) > 2 and max(map(len, lines)) <= page.COLUMNS
    assert " ".join(line.removeprefix(page.SAID) for line in lines[1:]).split() == ["It", *["word"] * 30]


def test_a_word_longer_than_a_line_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "a" * 100)
    assert [len(line) for line in lines] == [page.COLUMNS, 100 - page.WIDTH + len(page.SAID)]


def test_output_to_a_file_has_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    page.title("Title")
    page.code("s.pause()")
    page.note("word " * 30)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= page.COLUMNS
