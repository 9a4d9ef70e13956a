from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Iterator

import pytest
import torch

from djinn_client.errors import DjinnError
from djinn_client.protocol import FrameDecoder
from djinn_client.protocol.fields.points import Point, PointMap
from djinnd import messages
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.device.cpu import CpuDevice
from djinnd.engine.io.background import BackgroundWork
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.memory.memory import KvPlan
from djinnd.engine.probes.model_probes import ModelProbes
from djinnd.engine.windows.deliveries import Deliveries
from tests.support.descriptors import open_descriptors

RESID, LOGITS = Point("resid", 1), Point("logits")
WIDTH, VOCAB = 600, 700  # a row is not a multiple of a page
SECONDS = 60.0  # seconds until a test has failed


class Runner:
    """The part of ModelRunner that deliveries use."""

    name = "m"
    plan = KvPlan(page_size=16, page_bytes=0, num_pages=4, max_context=40)

    def __init__(self, device: CpuDevice) -> None:
        self.probes = ModelProbes(device, "m", PointMap(blocks=4, width=WIDTH, vocab=VOCAB), torch.float32)


class Engine:
    def __init__(self) -> None:
        self.device = CpuDevice(1 << 24)
        self.server, theirs = socket.socketpair()
        self.server.settimeout(SECONDS)
        self.channel = ServerChannel(theirs.detach())
        self.background = BackgroundWork(self.channel)
        self.failed: list[tuple[int, DjinnError]] = []
        self.deliveries = Deliveries(self.device, self.channel, self.background, self.fail)
        self.runner = Runner(self.device)

    def fail(self, session: Session, request: Request, error: DjinnError) -> None:
        assert session.id == "s"
        self.failed.append((request.id, error))

    def begin(self, number: int = 1, max_tokens: int = 4) -> Request:
        """Begins a request with two points and a prompt of eight tokens, in a session of two tokens. It captures all of
        them."""
        request = Request(number, 2, 10, max_tokens, capture=(LOGITS, RESID), seen_from=2)
        self.deliveries.open(Session("s", "m", 0, "agent"), request, self.runner)  # type: ignore[arg-type]
        for of_logits in (False, True):
            rows = self.runner.probes.captures.into(of_logits=of_logits)
            rows.copy_(torch.arange(rows.numel()).view(rows.shape))
        return request

    def turns(self, done: int = 1) -> list[tuple[messages.FromEngine, list[int]]]:
        """Turns until `done` replies have come."""
        until, told = time.monotonic() + SECONDS, []
        self.server.setblocking(False)
        while len(told) + len(self.failed) < done:
            assert time.monotonic() < until
            self.background.turn()
            try:
                data, fds, _, _ = socket.recv_fds(self.server, 1 << 16, 4)
            except BlockingIOError:
                continue
            told += [(messages.decode_from_engine(frame.payload), fds) for frame in FrameDecoder(1 << 20).feed(data)]
        return told

    def close(self) -> None:
        self.background.close()
        self.channel.close()
        self.server.close()
        self.device.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def finished(request: Request, generated: int) -> messages.Finished:
    return messages.Finished(request.id, "length", request.prompt_end + generated, generated, 8)


@pytest.mark.parametrize("staged", [0, 1 << 20], ids=["pinned", "staged"])
@pytest.mark.parametrize("piece", [1, 32 << 20])
@pytest.mark.parametrize(("generated", "positions"), [(4, 11), (1, 8), (0, 8)])
def test_captures_come_with_the_final_reply(
    engine: Engine, staged: int, piece: int, generated: int, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djinnd.engine.windows.deliveries.STAGED_BYTES", staged)
    monkeypatch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", piece)
    request = engine.begin()
    engine.deliveries.ended(request, finished(request, generated))
    ((reply, (fd,)),) = engine.turns()
    assert isinstance(reply, messages.Finished) and reply.capture is not None
    capture = reply.capture
    assert (capture.dtype, capture.first, capture.positions, capture.room) == ("float32", 2, positions, 11)
    with mmap.mmap(fd, capture.nbytes, access=mmap.ACCESS_READ) as memory:
        for offset, width in zip(capture.offsets, (VOCAB, WIDTH), strict=True):
            found = torch.frombuffer(bytearray(memory[offset : offset + 4 * positions * width]), dtype=torch.float32)
            assert torch.equal(found, torch.arange(positions * width).float())
    os.close(fd)
    assert len(engine.runner.probes.captures) == 0 and engine.device.budget.used == 0


def test_windows_are_made_and_replies_sent_during_a_step(engine: Engine) -> None:
    """Otherwise the device would idle between two steps."""
    request = engine.begin()
    assert not engine.deliveries.advance(), "there is nothing to tell yet"
    engine.background.begin(lambda: None).result(SECONDS)  # after the window is made, on the same thread
    engine.deliveries.ended(request, finished(request, 4))
    engine.server.setblocking(False)
    assert engine.background.turn(), "it goes on in the next turn, if no step comes first"
    with pytest.raises(BlockingIOError):
        engine.server.recv(1, socket.MSG_PEEK)
    until = time.monotonic() + SECONDS
    while engine.deliveries.advance():
        assert time.monotonic() < until
    data, (fd,), _, _ = socket.recv_fds(engine.server, 1 << 16, 4)
    os.close(fd)
    (frame,) = FrameDecoder(1 << 20).feed(data)
    reply = messages.decode_from_engine(frame.payload)
    assert isinstance(reply, messages.Finished) and reply.capture is not None
    assert len(engine.runner.probes.captures) == 0 and engine.device.budget.used == 0, "the rows were given back, too"
    engine.deliveries.drop(request)
    assert engine.background.turn() is False
    with pytest.raises(BlockingIOError):
        engine.server.recv(1)


def test_other_captures_between_a_request_s_end_and_its_copy_change_nothing(engine: Engine) -> None:
    """They may move all rows, and a step may fill the old ones."""
    request = engine.begin()
    engine.deliveries.advance()
    engine.deliveries.ended(request, finished(request, 4))
    other = engine.begin(number=2)
    for of_logits in (False, True):
        engine.runner.probes.captures.into(of_logits=of_logits).fill_(-1.0)
    ((reply, (fd,)),) = engine.turns()
    assert isinstance(reply, messages.Finished) and reply.capture is not None
    with mmap.mmap(fd, reply.capture.nbytes, access=mmap.ACCESS_READ) as memory:
        found = torch.frombuffer(bytearray(memory[: 4 * 11 * VOCAB]), dtype=torch.float32)
    os.close(fd)
    assert torch.equal(found, torch.arange(11 * VOCAB).float())
    engine.deliveries.drop(other)


@pytest.mark.parametrize("turns", [0, 1, 2], ids=["made", "ended", "copied"])
def test_a_delivery_dropped_during_a_step_sends_nothing(engine: Engine, turns: int) -> None:
    before = open_descriptors()
    request = engine.begin()
    engine.deliveries.advance()
    engine.background.begin(lambda: None).result(SECONDS)  # after the window is made, on the same thread
    engine.deliveries.ended(request, finished(request, 4))
    for _ in range(turns):
        engine.background.turn()
    engine.deliveries.drop(request)
    assert not engine.deliveries.advance() and not engine.background.turn()
    engine.background.close()
    assert engine.device.budget.used == 0 and open_descriptors() == before
    engine.server.setblocking(False)
    with pytest.raises(BlockingIOError):
        engine.server.recv(1)


@pytest.mark.parametrize("begun", [False, True])
def test_a_dropped_delivery_frees_everything_and_sends_nothing(engine: Engine, begun: bool) -> None:
    before = open_descriptors()
    request = engine.begin()
    if begun:
        engine.background.turn()
    engine.deliveries.drop(request)
    engine.deliveries.drop(request)
    engine.background.close()
    assert engine.device.budget.used == 0 and open_descriptors() == before
    engine.server.setblocking(False)
    with pytest.raises(BlockingIOError):
        engine.server.recv(1)


def test_an_unloaded_model_ends_deliveries_without_their_captures(engine: Engine) -> None:
    request = engine.begin()
    engine.background.turn()
    engine.deliveries.ended(request, finished(request, 4))
    engine.deliveries.abandon(engine.runner)  # type: ignore[arg-type]
    assert engine.turns() == [(finished(request, 4), [])]
    assert len(engine.runner.probes.captures) == 0


def test_an_unloaded_model_cancels_requests_that_wait_for_a_hit(engine: Engine) -> None:
    request = engine.begin()
    engine.deliveries.ended(request, messages.Finished(request.id, "breakpoint", 9, 4, 5, stopped=2))
    engine.deliveries.abandon(engine.runner)  # type: ignore[arg-type]
    assert engine.turns() == [(messages.Finished(request.id, "cancelled", 9, 4, 5), [])]


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_window_that_cannot_be_made_fails_the_request(
    engine: Engine, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuses)
    request = engine.begin()
    if has_ended:
        engine.deliveries.ended(request, finished(request, 4))
    assert engine.turns() == []
    ((number, error),) = engine.failed
    assert number == request.id and error.code == "out_of_memory" and error.data["needed"] >= 11 * 4 * (WIDTH + VOCAB)
    assert len(engine.runner.probes.captures) == 0


def test_a_capture_has_no_more_positions_than_the_model(engine: Engine) -> None:
    request = engine.begin(max_tokens=1000)
    engine.deliveries.ended(request, finished(request, 4))
    ((reply, (fd,)),) = engine.turns()
    os.close(fd)
    assert reply.capture.room == 40 - 2  # type: ignore[union-attr]
