from __future__ import annotations

import asyncio
import mmap
import os

import pytest

from djinn_client.errors import QuotaExceeded
from djinnd.server.quotas.ledger import WINDOW_BYTES, Ledger, Limit
from djinnd.server.system.closer import Closer
from djinnd.server.wire.windows import Windows
from tests.support.descriptors import open_descriptors

SIZE = 1 << 16


def new_window():
    fd = os.memfd_create("window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    return fd


def play(act):
    """Runs a test with the windows of a user that may keep two, and the user's ledger."""

    async def run():
        before = open_descriptors()
        ledger = Ledger(lambda resource: Limit("limits.window_bytes_per_user", "", 2 * SIZE))
        windows = Windows(ledger, Closer().lane())
        try:
            await act(windows, ledger)
        finally:
            windows.close()
        assert open_descriptors() <= before + 2  # the loop's own

    asyncio.run(run())


async def until_gone(windows):
    async with asyncio.timeout(30):
        while len(windows):
            await asyncio.sleep(0.01)


def reopened(fd):
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return lambda: os.close(again)


def mapped(fd):
    memory = mmap.mmap(fd, SIZE)
    os.close(fd)
    return memory.close


def mapped_for_reading(fd):
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    memory = mmap.mmap(again, SIZE, prot=mmap.PROT_READ)
    os.close(again)
    return memory.close


def duplicated(fd):
    again = os.dup(fd)
    os.close(fd)
    return lambda: os.close(again)


@pytest.mark.parametrize("keep", [reopened, mapped, mapped_for_reading, duplicated])
def test_a_window_counts_until_it_is_gone_however_it_is_kept(keep):
    async def act(windows, ledger):
        (given,) = windows.hand_over([new_window()])
        drop = keep(given)
        windows.reserve(SIZE)
        windows.release(SIZE)
        assert ledger.used(WINDOW_BYTES) == SIZE
        drop()
        await until_gone(windows)
        assert ledger.used(WINDOW_BYTES) == 0

    play(act)


def test_the_number_of_windows_is_limited_and_a_dropped_one_makes_room():
    async def act(windows, ledger):
        given = windows.hand_over([new_window(), new_window()])
        with pytest.raises(QuotaExceeded, match=r"limits\.window_bytes_per_user is 131,072: drop"):
            windows.reserve(SIZE)
        os.close(given[0])
        windows.reserve(SIZE)
        with pytest.raises(QuotaExceeded):
            windows.reserve(SIZE)
        windows.release(SIZE)
        os.close(given[1])

    play(act)


def test_a_window_can_be_written_by_the_client():
    async def act(windows, ledger):
        window = new_window()
        os.pwrite(window, b"from the engine", 0)
        (given,) = windows.hand_over([window])
        assert os.pread(given, 15, 0) == b"from the engine"
        os.pwrite(given, b"by the client  ", 0)
        os.close(given)

    play(act)
