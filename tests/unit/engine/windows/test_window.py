from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from djinnd.device.cpu import CpuDevice
from djinnd.engine.io.background import BackgroundWork
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.windows.window import StagedWindow, Window
from djinnd.kvcache.tier import HOST_PAGE


@pytest.fixture
def background() -> Iterator[BackgroundWork]:
    ours, theirs = socket.socketpair()
    channel = ServerChannel(theirs.detach())
    background = BackgroundWork(channel)
    yield background
    background.close()
    channel.close()
    ours.close()


class PinningDevice(CpuDevice):
    """Records pinned memory."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.pinned: list[int] = []

    def pin(self, pieces, *, read_only: bool = False) -> None:  # type: ignore[no-untyped-def]
        self.pinned += [len(piece) for piece in pieces]

    def unpin(self, pieces) -> None:  # type: ignore[no-untyped-def]
        for piece in pieces:
            self.pinned.remove(len(piece))


@pytest.fixture
def device() -> Iterator[PinningDevice]:
    device = PinningDevice()
    yield device
    device.close()


@pytest.mark.parametrize(("page", "piece", "least"), [(HOST_PAGE, 1, 1), (HOST_PAGE, 3 * HOST_PAGE, 3), (96, 1, 128)])
def test_pieces_begin_on_host_pages_and_cover_the_memory(
    device: PinningDevice,
    background: BackgroundWork,
    monkeypatch: pytest.MonkeyPatch,
    page: int,
    piece: int,
    least: int,
) -> None:
    monkeypatch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", piece)
    window = Window(device, torch.zeros(200 * page, dtype=torch.uint8), page, background)
    pieces = list(window.pieces())
    assert all(first * page % HOST_PAGE == 0 for first, _ in pieces)
    assert [first for first, _ in pieces] == list(range(0, 200, least)) and sum(count for _, count in pieces) == 200


def test_leaving_a_window_completes_its_copies_and_unpins_its_memory(
    device: PinningDevice, background: BackgroundWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", HOST_PAGE)
    memory, source = torch.zeros(4 * HOST_PAGE, dtype=torch.uint8), torch.arange(4).repeat_interleave(HOST_PAGE).byte()
    with Window(device, memory, HOST_PAGE, background) as window:
        window.pin()
        assert device.pinned == [HOST_PAGE] * 4
        for first, count in window.pieces():
            part = slice(first * HOST_PAGE, (first + count) * HOST_PAGE)
            window.queue([(memory[part], source[part])])
    assert torch.equal(memory, source)
    background.close()
    assert device.pinned == []


def test_a_small_window_is_not_pinned_and_is_filled_by_settle(
    device: PinningDevice, background: BackgroundWork
) -> None:
    memory, source = torch.full((2 * HOST_PAGE,), 7, dtype=torch.uint8), torch.arange(1, 101, dtype=torch.uint8)
    with StagedWindow(device, memory, HOST_PAGE, background) as window:
        window.pin()
        assert device.pinned == [] and not memory.any()
        window.queue([(memory[50:80], source[:30]), (memory[HOST_PAGE : HOST_PAGE + 70], source[30:])])
    assert memory[50:80].tolist() == list(range(1, 31))
    assert memory[HOST_PAGE : HOST_PAGE + 70].tolist() == list(range(31, 101))
    assert int(memory.count_nonzero()) == 100, "nothing else of the staging, which others have used"
