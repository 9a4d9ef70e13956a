from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from djinn_client.errors import ModelRejected
from djinnd.weights import reading
from djinnd.weights.reading import LEAST, Patience, Readers

FOREVER = 60.0  # seconds: a test that waits so long has failed


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "TICK", 0.01)
    monkeypatch.setattr(reading, "SECONDS", 0.2)
    monkeypatch.setattr(reading, "_LET_END", 0.05)


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """An event that is set when the test is over: a job that waits for it hangs during the test."""
    event = threading.Event()
    yield event
    event.set()


def test_jobs_return_their_results_and_errors() -> None:
    readers = Readers(2)
    assert [Patience().result(readers.submit(lambda n=n: n * n)) for n in range(5)] == [0, 1, 4, 9, 16]
    for error in (KeyError("k"), TimeoutError("of the job's own")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error.args[0])):
            Patience().result(readers.submit(fail))
    readers.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "djinn-read"]


def test_close_abandons_stuck_threads_and_cancels_waiting_jobs(stuck: threading.Event) -> None:
    readers = Readers(1)
    first, second = readers.submit(stuck.wait), readers.submit(lambda: None)
    with pytest.raises(ModelRejected, match=r"gave 0 bytes in 0 s, so the load was given up"):
        Patience().result(first)
    readers.close()
    with pytest.raises(CancelledError):
        second.result(FOREVER)
    assert not first.done()


class Trickle:
    """A job for which a few bytes arrive between checks."""

    def __init__(self, step: int, looks: int) -> None:
        self.job: Future[str] = Future()
        self.bytes, self._step, self.looks = 0, step, looks
        self.slow = 0

    def look(self) -> None:
        self.bytes += self._step
        self.looks -= 1
        if self.looks == 0:
            self.job.set_result("read")

    def was_slow(self) -> None:
        self.slow += 1

    def patience(self) -> Patience:
        return Patience(lambda: self.bytes, self.look, self.was_slow)


def test_slow_files_are_waited_for_and_let_other_loads_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files take longer than SECONDS, at a rate below SLOW."""
    trickle = Trickle(LEAST, looks=60)
    monkeypatch.setattr(reading, "SLOW", 10**12)
    assert trickle.patience().result(trickle.job) == "read"
    assert trickle.slow == 60


def test_files_that_come_in_drops_are_given_up() -> None:
    """They are given up even if each drop ends a job, because patience belongs to the load and not to one read."""
    trickle = Trickle(1, looks=10**9)
    patience = trickle.patience()

    def read_on() -> None:
        while True:
            trickle.looks, trickle.job = 2, Future()
            patience.result(trickle.job)

    with pytest.raises(ModelRejected, match="given up"):
        read_on()
    assert trickle.slow > 0


def test_an_exception_of_look_ends_the_wait() -> None:
    def look() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Patience(look=look).result(Future())
