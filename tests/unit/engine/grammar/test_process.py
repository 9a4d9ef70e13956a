"""The engine's side of a grammar process. The test holds the process's end of the socket."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from djinnd.engine.grammar.process import GrammarProcess
from djinnd.jobs.grammar import Begin, State, States, encode


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GrammarProcess, socket.socket]]:
    """The engine's side, and its process's end of the socket."""
    found: list[int] = []
    start = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        found.append(os.dup(options["pass_fds"][0]))
        with pytest.raises(PermissionError):
            os.ftruncate(options["pass_fds"][1], 0)  # the engine reads the masks there
        return start(["sleep", "60"])

    monkeypatch.setattr(subprocess, "Popen", popen)
    process = GrammarProcess(0, [0], 2048, 10.0, 1 << 30, is_table=False)
    with socket.socket(fileno=found[0]) as theirs:
        yield process, theirs
    process.kill()
    process.wait()


def test_only_what_it_has_been_asked_about_is_heard_and_that_once(ends: tuple[GrammarProcess, socket.socket]) -> None:
    process, theirs = ends
    for run in (1, 2, 3):
        process.ask(Begin(run, run, "", []), [run])
    process.forget(3)
    told = encode(States([1, 3, 8], [State(2, [5]), State(9, [6])]))
    theirs.sendall(told + told)
    assert process.hear() == States([1], [State(2, [5])])
    assert process.hear() == States() and not process.failure


def test_garbage_and_its_end_are_failures(ends: tuple[GrammarProcess, socket.socket]) -> None:
    process, theirs = ends
    theirs.sendall(encode(States([1]))[:-1] + b"\xff")
    assert process.hear() == States() and process.failure


def test_an_answer_that_takes_too_long_is_a_failure(ends: tuple[GrammarProcess, socket.socket]) -> None:
    process, theirs = ends
    process.ask(Begin(1, 1, "", []), [1])
    theirs.sendall(encode(States([1])))
    assert process.hear() == States([1])
    process.ask(Begin(2, 2, "", []), [2])
    process.check(0.0)
    assert not process.failure
    process.check(1e12)
    assert "more than 10 s" in process.failure
