"""Calls beside each other: all begin before any is waited for, and all are given up when one fails."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from djinn_client.transport.beside import run_beside
from djinn_client.transport.steps import Steps, Wait


class Pipes:
    """A pipe for each call, and what has happened, in order."""

    def __init__(self, count: int) -> None:
        self.ends = [os.pipe() for _ in range(count)]
        self.told: list[str] = []

    def call(self, number: int, after: int | None = None) -> Steps[int]:
        """Waits for its pipe. Then it writes into the pipe `after`, and returns its number."""
        try:
            self.told.append(f"{number} begins")
            yield Wait("read", self.ends[number][0])
            self.told.append(f"{number} goes on")
            if after is not None:
                os.write(self.ends[after][1], b".")
            return number
        except GeneratorExit:
            self.told.append(f"{number} is given up")
            raise


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes(3)
    yield made
    for read, write in made.ends:
        os.close(read)
        os.close(write)


def test_all_begin_first_and_the_results_have_the_order_of_the_calls(pipes: Pipes) -> None:
    os.write(pipes.ends[2][1], b".")
    assert run_beside([pipes.call(0), pipes.call(1, after=0), pipes.call(2, after=1)]) == [0, 1, 2]
    assert pipes.told == ["0 begins", "1 begins", "2 begins", "2 goes on", "1 goes on", "0 goes on"]


def test_calls_that_wait_for_room_and_for_time_go_on_too(pipes: Pipes) -> None:
    def writes() -> Steps[str]:
        yield Wait("write", pipes.ends[0][1])
        return "written"

    def pauses() -> Steps[str]:
        yield Wait("pause")
        yield Wait("pause")
        return "waited"

    def waits_for_nothing() -> Steps[str]:
        return "done"
        yield

    assert run_beside([writes(), pauses(), waits_for_nothing()]) == ["written", "waited", "done"]


def test_a_failure_gives_up_the_others(pipes: Pipes) -> None:
    def fails() -> Steps[int]:
        yield Wait("write", pipes.ends[1][1])
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_beside([pipes.call(0), fails(), pipes.call(2)])
    assert pipes.told[-2:] == ["0 is given up", "2 is given up"]


def test_no_call_at_all() -> None:
    assert run_beside([]) == []


def test_a_wait_with_a_time_ends_without_its_event() -> None:
    silent, other = socket.socketpair()

    def patient() -> Steps[str]:
        yield Wait("read", silent.fileno(), 0.01)
        yield Wait("pause", seconds=0.01)
        return "went on"

    with silent, other:
        assert run_beside([patient(), patient()]) == ["went on", "went on"]
