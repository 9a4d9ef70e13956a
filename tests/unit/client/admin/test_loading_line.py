from __future__ import annotations

import io
import sys
import threading
from functools import partial

import pytest

import djinn_client as djinn
from djinn_client import admin
from djinn_client.admin.loading_line import LoadingLine, line_of, loading_line
from djinn_client.protocol import LoadModel, ModelInfo, ModelReply, Progress
from tests.support.scripted_daemon import Line, ScriptedDaemon

READING = Progress(id=1, model="llama", stage="reading", done=6 << 30, total=24 << 30)
CHECKING = Progress(id=1, model="llama", stage="checking")


class Terminal(io.StringIO):
    """A terminal that says when something was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = threading.Event()

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.drawn.set()


def test_the_progress_line_fits_its_columns() -> None:
    assert line_of(READING, 80) == f"llama: reading {'━' * 6}{'─' * 18} 6.0 of 24.0 GiB"
    assert line_of(CHECKING, 80) == "llama: checking"
    sending = Progress(id=1, model="", stage="sending", done=3 << 20, total=4 << 20)
    assert line_of(sending, 80) == f"sending {'━' * 18}{'─' * 6} 3.0 of 4.0 MiB"
    assert len(line_of(READING, 20)) == 19


def test_a_short_load_shows_nothing() -> None:
    terminal = Terminal()
    line = LoadingLine(terminal)
    line(READING)
    line.close()
    assert terminal.getvalue() == ""


def test_a_long_load_is_shown_and_wiped_away() -> None:
    terminal = Terminal()
    line = LoadingLine(terminal, patience_s=0.01)
    line(READING)
    assert terminal.drawn.wait(30)
    line(CHECKING)
    line.close()
    line(READING)  # which comes late
    _, first, second, wiped = terminal.getvalue().split("\r\x1b[K")
    assert first.startswith("llama: reading ━")
    assert second == "llama: checking"
    assert wiped == ""


def test_where_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with loading_line(None) as told:
        assert told is None, "it is no terminal"
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with loading_line(None) as told:
        assert isinstance(told, LoadingLine)
    seen: list[Progress] = []
    with loading_line(seen.append) as told:
        assert told == seen.append, "the caller shows it"
    monkeypatch.setenv("TERM", "dumb")
    with loading_line(None) as told:
        assert told is None


def test_a_client_shows_it_while_a_model_loads(daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(admin.loading_line, "LoadingLine", partial(LoadingLine, patience_s=0.01))

    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(LoadModel)
        line.send(Progress(id=request.id, model="llama", stage="checking"))
        assert terminal.drawn.wait(30)
        line.send(ModelReply(id=request.id, model=ModelInfo(name="llama", path="/l")))
        line.expect_hang_up()

    with djinn.Client(daemon.play(script)) as client:
        assert client.load("llama").name == "llama"
    assert terminal.getvalue() == "\r\x1b[Kllama: checking\r\x1b[K"
