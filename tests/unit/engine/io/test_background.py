from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event

import pytest

from djinn_client.errors import OutOfMemory
from djinn_client.protocol import FrameDecoder
from djinnd import messages
from djinnd.engine.io.background import BackgroundTask, BackgroundWork
from djinnd.engine.io.channel import ServerChannel

SECONDS = 60.0  # seconds until a test has failed


class Engine:
    def __init__(self) -> None:
        self.server, theirs = socket.socketpair()
        self.server.settimeout(SECONDS)
        self.channel = ServerChannel(theirs.detach())
        self.background = BackgroundWork(self.channel)

    def told(self) -> messages.FromEngine:
        (frame,) = FrameDecoder(1 << 20).feed(self.server.recv(1 << 16))
        return messages.decode_from_engine(frame.payload)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.background.close()
    engine.channel.close()
    engine.server.close()


def noted(log: list[str], waits: Future[None] | None = None) -> BackgroundTask:
    try:
        log.append("begun")
        yield waits
        log.append("gone on")
        yield None
        log.append("ended")
    finally:
        log.append("cleaned up")


def test_a_course_runs_one_part_a_turn(engine: Engine) -> None:
    log: list[str] = []
    engine.background.start(1, noted(log))
    assert log == []
    assert [engine.background.turn() for _ in range(4)] == [True, True, False, False]
    assert log == ["begun", "gone on", "ended", "cleaned up"]


def test_a_waiting_course_does_not_keep_the_engine_busy(engine: Engine) -> None:
    log: list[str] = []
    ready: Future[None] = Future()
    engine.background.start(1, noted(log, ready))
    assert [engine.background.turn() for _ in range(3)] == [False] * 3 and log == ["begun"]
    ready.set_result(None)
    assert engine.background.turn() and log == ["begun", "gone on"]


def test_work_on_the_thread_wakes_the_engine(engine: Engine) -> None:
    found: list[bool] = []
    gate = Event()

    def task() -> BackgroundTask:
        found.append((yield from engine.background.on_thread(lambda: gate.wait(SECONDS))))

    engine.background.start(1, task())
    assert not engine.background.turn()
    gate.set()
    assert engine.channel.receive(SECONDS) == []
    engine.background.turn()
    assert found == [True]


def test_a_course_that_waits_for_a_done_future_goes_on_at_once(engine: Engine) -> None:
    log: list[str] = []
    ready: Future[None] = Future()
    ready.set_result(None)
    engine.background.start(1, noted(log, ready))
    assert engine.background.turn() and log == ["begun", "gone on"]


def test_a_course_s_error_is_its_request_s_reply(engine: Engine) -> None:
    def task() -> BackgroundTask:
        yield None
        raise OutOfMemory("no room", needed=3)

    engine.background.start(9, task())
    assert [engine.background.turn() for _ in range(3)] == [True, False, False]
    assert engine.told() == messages.Failed(9, "out_of_memory", "no room", {"needed": 3})


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_dropped_course_cleans_up_if_it_had_begun(engine: Engine, turns: int) -> None:
    log: list[str] = []
    engine.background.start(1, noted(log))
    for _ in range(turns):
        engine.background.turn()
    engine.background.drop(1)
    assert log[turns:] == ["cleaned up"] * bool(turns) and not engine.background.turn()


def test_a_course_may_drop_another(engine: Engine) -> None:
    log: list[str] = []

    def task() -> BackgroundTask:
        engine.background.drop(2)
        yield None

    engine.background.start(1, task())
    engine.background.start(2, noted(log))
    assert [engine.background.turn() for _ in range(2)] == [True, False] and log == []


def test_work_without_a_waiter_runs_in_order_and_its_errors_are_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[int] = []

    def fails() -> None:
        log.append(1)
        raise OSError(5, "oh")

    engine.background.later(fails)
    engine.background.later(lambda: log.append(2))
    engine.background.close()
    assert log == [1, 2] and "background_work_failed" in caplog.text
