"""Rates of a folder's disk: reads and writes of one size, several at a time, past the page cache where possible.

    python -m tools.bench.paging.disk FOLDER [--piece-mib 4] [--pieces 256]

It writes a file that grows, and then reads it.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import click

ALIGNMENT = 4096  # of addresses, offsets and sizes past the page cache
IN_FLIGHT = 8


class DiskRates(NamedTuple):
    """Bytes a second."""

    write: float  # of a file that grows
    read: float
    direct: bool  # past the page cache


def disk_rates(folder: Path, piece_bytes: int, pieces: int, in_flight: int = IN_FLIGHT) -> DiskRates:
    """Writes and reads a temporary file in the folder. Pieces are rounded up to multiples of 4096 bytes."""
    extent = -(-piece_bytes // ALIGNMENT) * ALIGNMENT
    buffers = [mmap.mmap(-1, extent) for _ in range(in_flight)]  # begins at a page
    for buffer in buffers:
        buffer.write(os.urandom(ALIGNMENT) * (extent // ALIGNMENT))
    descriptor, name = tempfile.mkstemp(dir=folder)
    os.close(descriptor)
    try:
        descriptor, direct = _open_direct(name)
        try:
            os.ftruncate(descriptor, pieces * extent)
            write = _rate(os.pwritev, descriptor, buffers, extent, pieces)
            return DiskRates(write, _rate(os.preadv, descriptor, buffers, extent, pieces), direct)
        finally:
            os.close(descriptor)
    finally:
        os.unlink(name)


def _open_direct(name: str) -> tuple[int, bool]:
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(name, os.O_RDWR), False


def _rate(
    move: Callable[[int, list[mmap.mmap], int], int],
    descriptor: int,
    buffers: list[mmap.mmap],
    extent: int,
    pieces: int,
) -> float:
    """Moves all pieces. Each thread has a buffer, and takes every n-th piece of n threads."""

    def share(number: int) -> None:
        for piece in range(number, pieces, len(buffers)):
            if move(descriptor, [buffers[number]], piece * extent) != extent:
                raise OSError(errno.EIO, f"a piece of {extent:,} bytes went in part")

    with ThreadPoolExecutor(len(buffers)) as threads:
        began = time.perf_counter()
        list(threads.map(share, range(len(buffers))))
        return pieces * extent / (time.perf_counter() - began)


@click.command(help=(__doc__ or "").split("\n\n", 1)[0])
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--piece-mib", default=4.0, show_default=True)
@click.option("--pieces", default=256, show_default=True)
def main(folder: Path, piece_mib: float, pieces: int) -> None:
    rates = disk_rates(folder, int(piece_mib * (1 << 20)), pieces)
    how = "past the page cache" if rates.direct else "through the page cache"
    click.echo(f"writes {rates.write / 1e9:.2f} GB/s, reads {rates.read / 1e9:.2f} GB/s, {how}, {IN_FLIGHT} in flight")


if __name__ == "__main__":
    main()
