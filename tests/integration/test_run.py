"""`djinnctl run` at a terminal, against a real daemon."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.chat_families import TURNS
from tests.support.daemon import PATIENCE, ROOT, Daemon, clean_environ, wait_for

PROMPT = b">>> "


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a model that has a chat template from the command line."""
    template = tmp_path_factory.mktemp("template") / "turns.jinja"
    template.write_text(TURNS)
    with DaemonStarter() as start:
        running = start()
        command = [sys.executable, "-m", "djinnctl", "load", MODEL, "--chat-template", str(template)]
        subprocess.run(command, env=environ(running, template.parent), cwd=ROOT, check=True, capture_output=True)
        yield running


def environ(daemon: Daemon, state: Path) -> dict[str, str]:
    return clean_environ() | {"DJINND_ADDRESS": daemon.address, "XDG_STATE_HOME": str(state), "TERM": "xterm"}


class Terminal:
    """The command at a pseudo-terminal."""

    def __init__(self, environ: dict[str, str], *arguments: str) -> None:
        self._fd, theirs = pty.openpty()
        command = [sys.executable, "-m", "djinnctl", "run", MODEL, *arguments]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, cwd=ROOT, start_new_session=True
        )
        os.close(theirs)
        self._shown = b""

    def until(self, wanted: bytes) -> bytes:
        """Reads the output up to `wanted`, since the last call."""
        while wanted not in self._shown:
            data = b""
            with suppress(OSError):  # EIO: the other end is closed
                data = os.read(self._fd, 4096)
            assert data, self._shown
            self._shown += data
        shown, self._shown = self._shown.split(wanted, 1)
        return shown + wanted

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(chatty: Daemon, tmp_path: Path) -> Iterator[Terminal]:
    settings = ("--set", "max_tokens=8", "--set", "stats=on", "--set", "temperature=0")
    terminal = Terminal(environ(chatty, tmp_path), *settings)
    yield terminal
    terminal.close()


def test_a_second_turn_computes_only_its_message(terminal: Terminal) -> None:
    terminal.until(PROMPT)
    terminal.type("x = 1 " * 60 + "\n")
    terminal.until(b"were computed")
    terminal.until(PROMPT)
    terminal.type("and more\n")
    stats = terminal.until(b"were computed").decode().rpartition("of ")[2].split()
    before, computed = int(stats[0]), int(stats[4])
    assert before > 100 and computed < 30
    terminal.until(PROMPT)
    terminal.type("/bye\n")
    assert terminal.process.wait(PATIENCE) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, chatty: Daemon, tmp_path: Path) -> None:
    terminal.until(PROMPT)
    terminal.type("/set max_tokens 1500\n")
    terminal.until(PROMPT)
    terminal.type("class A:\n")
    wait_for(lambda: [info.state for info in djinn.sessions(address=chatty.address)] == ["running"])
    terminal.process.send_signal(signal.SIGINT)
    terminal.until(b"stopped")
    terminal.until(PROMPT)
    terminal.type("/set max_tokens 4\n")
    terminal.until(PROMPT)
    terminal.type("def f\n")
    terminal.until(b"4 tokens, the first after")
    terminal.until(PROMPT)
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE) == 0
    assert djinn.sessions(address=chatty.address) == [], "the program must close its session"
    assert "class A:" in (tmp_path / "djinnctl" / "history").read_text()
