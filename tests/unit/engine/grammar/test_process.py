"""The engine's side of a grammar process. The test holds the process's end of the socket."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from djinnd.engine.grammar.process import GrammarProcess
from djinnd.jobs.grammar import BeginGrammar, GrammarState, GrammarStates, TryTokens, encode


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
        process.ask(BeginGrammar(run, run, "", []), [run])
    process.forget(3)
    told = encode(GrammarStates([1, 3, 8], [GrammarState(2, [5]), GrammarState(9, [6])]))
    theirs.sendall(told + told)
    assert process.read_answers() == GrammarStates([1], [GrammarState(2, [5])])
    assert process.read_answers() == GrammarStates() and not process.failure


def test_counts_of_masks_are_heard_that_the_last_try_asked_for(ends: tuple[GrammarProcess, socket.socket]) -> None:
    """Another run may belong to another user, and a larger count would make the engine read slots that are not lent."""
    process, theirs = ends
    process.ask(TryTokens(5, [(1, [7, 8], [10, 11])]))
    process.ask(TryTokens(6, [(1, [7, 8], [10, 11]), (2, [9], [12]), (3, [9], [13])]))
    theirs.sendall(encode(GrammarStates(step=5, tried=[(1, 2)])))
    theirs.sendall(encode(GrammarStates(step=6, tried=[(1, 1), (2, 2), (3, -1), (4, 0)])))
    assert process.read_answers() == GrammarStates(tried=[(1, 1)])


def test_garbage_and_its_end_are_failures(ends: tuple[GrammarProcess, socket.socket]) -> None:
    process, theirs = ends
    theirs.sendall(encode(GrammarStates([1]))[:-1] + b"\xff")
    assert process.read_answers() == GrammarStates() and process.failure


def test_an_answer_that_takes_too_long_is_a_failure(ends: tuple[GrammarProcess, socket.socket]) -> None:
    process, theirs = ends
    process.ask(BeginGrammar(1, 1, "", []), [1])
    theirs.sendall(encode(GrammarStates([1])))
    assert process.read_answers() == GrammarStates([1])
    process.ask(BeginGrammar(2, 2, "", []), [2])
    process.check(0.0)
    assert not process.failure
    process.check(1e12)
    assert "more than 10 s" in process.failure
