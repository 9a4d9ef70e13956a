from __future__ import annotations

import io
from pathlib import Path

import pytest

from djinnctl.chat.terminal import Answer, history_file, visible


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(out: io.StringIO) -> str:
    answer = Answer(out)
    answer.reason("Let me ")
    answer.reason("think.")
    answer.content("Paris.\x1b]0;title\x07")
    answer.end()
    return out.getvalue()


def test_reasoning_is_dimmed_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert written(Terminal()) == "\x1b[2mLet me think.\x1b[0m\n\nParis.␛]0;title␇\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(Terminal()) == "(Let me think.)\n\nParis.␛]0;title␇\n"


def test_a_program_gets_the_answer_as_it_is() -> None:
    assert written(io.StringIO()) == "Paris.\x1b]0;title\x07\n"


def test_an_interrupted_thought_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    answer = Answer(out)
    answer.reason("Hm")
    answer.end()
    assert out.getvalue() == "\x1b[2mHm\x1b[0m\n\n"
    answer = Answer(empty := Terminal())
    answer.end()
    assert empty.getvalue() == ""


def test_control_characters_are_shown() -> None:
    assert visible("a\tb\nc\r\x00\x7f\x9b é") == "a\tb\nc␍␀␡� é"


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "djinnctl" / "history"
