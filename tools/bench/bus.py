"""What the machine can do: pinned host memory to the device, and the device's memory to itself. Needs torch.

    python -m tools.bench.bus [--pieces-mib 16,64]

On the CPU, where the device's memory is the host's, both are copies from memory to memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import click
import msgspec
import torch
from torch import Tensor

LARGE = (128, 512)  # MiB of a copy, where larger ones gain nothing: the ceiling is theirs
COPIES = 7  # of which the first does not count


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second, medians."""

    device: str
    bus: dict[int, float]  # host to device, by MiB of a piece
    memory: float  # read and written by a copy within the device's memory


def bus_rates(device: str, pieces_mib: Iterable[int]) -> dict[int, float]:
    """Bytes a second to the device, by MiB of a piece."""
    nbytes = _run_bytes(device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device != "cpu").fill_(1)
    target = torch.empty_like(host, device=device)
    return {piece: _rate(_in_pieces(host, target, piece << 20), nbytes, device) for piece in pieces_mib}


def memory_rate(device: str) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    nbytes = 2 * _run_bytes(device)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2 * nbytes, device)


def _run_bytes(device: str) -> int:
    """Copied at a time: far more than any cache holds."""
    return 512 << 20 if device == "cpu" else 2 << 30


def _in_pieces(host: Tensor, target: Tensor, nbytes: int) -> Callable[[], object]:
    pairs = list(zip(target.split(nbytes), host.split(nbytes), strict=True))
    return lambda: [to.copy_(piece, non_blocking=True) for to, piece in pairs]


def _rate(copy: Callable[[], object], nbytes: int, device: str) -> float:
    clock = _host_clock if device == "cpu" else _device_clock
    return nbytes / statistics.median([clock(copy) for _ in range(COPIES)][1:])


def _host_clock(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _device_clock(work: Callable[[], object]) -> float:
    start: Any = torch.cuda.Event(enable_timing=True)
    end: Any = torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@click.command(help=(__doc__ or "").split("\n\n", 1)[0])
@click.option("--device", default="auto", show_default=True)
@click.option("--pieces-mib", default="", help="Further sizes of a copy, as in 16,64.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def main(device: str, pieces_mib: str, as_json: bool) -> None:
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    pieces = sorted({*LARGE, *(int(piece) for piece in pieces_mib.split(",") if piece)})
    rates = Rates(device=device, bus=bus_rates(device, pieces), memory=memory_rate(device))
    if as_json:
        click.echo(msgspec.json.encode(rates))
        return
    for piece, rate in rates.bus.items():
        click.echo(f"host to device in pieces of {piece} MiB: {rate / 1e9:.1f} GB/s")
    click.echo(f"within the device: {rates.memory / 1e9:.0f} GB/s read and written")


if __name__ == "__main__":
    main()
