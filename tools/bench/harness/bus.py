"""Copy rates of the machine: pinned host memory to the device and back, and within device memory. Needs torch.

    python -m tools.bench.harness.bus [--pieces-mib 16,64] [--both-ways]

On the CPU, device memory is host memory, so both are copies from memory to memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import msgspec
import torch
from torch import Tensor

from tools.bench.harness.apart import output_of

LARGE = (128, 512)  # MiB of a copy; larger copies are not faster, so these give the ceiling
COPIES = 7  # the first one does not count


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second, medians."""

    device: str
    bus: dict[int, float]  # host to device, by MiB of a copy
    memory: float  # bytes read and written by a copy within device memory
    down: float | None = None  # device to host
    both: float | None = None  # each direction, while the other one is as busy

    @property
    def up(self) -> float:
        """Host to device: the best rate of all piece sizes."""
        return max(self.bus.values())


def measured_apart(device: str, *options: str) -> Rates:
    """Measures in a process of its own, so that this process holds no device memory. `options` are the command's."""
    said = output_of("harness.bus", "--json", f"--device={device}", *options)
    return msgspec.json.decode(said, type=Rates, strict=False)


def bus_rates(device: str, pieces_mib: Iterable[int]) -> dict[int, float]:
    """Host to device: bytes a second, by MiB of a piece."""
    nbytes = _run_bytes(device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device != "cpu").fill_(1)
    target = torch.empty_like(host, device=device)
    return {piece: _rate(_in_pieces(host, target, piece << 20), nbytes, device) for piece in pieces_mib}


def down_rate(device: str) -> float:
    """Device to host: bytes a second, in large pieces."""
    nbytes = _run_bytes(device)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
    return _rate(_in_pieces(source, host, LARGE[0] << 20), nbytes, device)


def both_rate(device: str) -> float:
    """Bytes a second in each direction, while both directions are busy."""
    nbytes = _run_bytes(device) // 2
    shape: dict[str, Any] = {"dtype": torch.uint8, "pin_memory": device != "cpu"}
    hosts = [torch.empty(nbytes, **shape).fill_(1) for _ in range(2)]
    devices = [torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1) for _ in range(2)]
    piece = LARGE[0] << 20
    ways = [_in_pieces(hosts[0], devices[0], piece), _in_pieces(devices[1], hosts[1], piece)]
    if device == "cpu":
        with ThreadPoolExecutor(2) as threads:
            return _rate(lambda: list(threads.map(lambda way: way(), ways)), nbytes, device)
    streams: list[Any] = [torch.cuda.Stream(device) for _ in ways]

    def both() -> None:
        now: Any = torch.cuda.current_stream()
        for stream, way in zip(streams, ways, strict=True):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                way()
        for stream in streams:
            now.wait_stream(stream)

    return _rate(both, nbytes, device)


def memory_rate(device: str) -> float:
    """Bytes a second that a copy within device memory reads and writes together."""
    nbytes = 2 * _run_bytes(device)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2 * nbytes, device)


def _run_bytes(device: str) -> int:
    """Bytes of one measurement: far more than any cache holds."""
    return 512 << 20 if device == "cpu" else 2 << 30


def _in_pieces(source: Tensor, target: Tensor, nbytes: int) -> Callable[[], object]:
    pairs = list(zip(target.split(nbytes), source.split(nbytes), strict=True))
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
@click.option("--both-ways", is_flag=True, help="Also measure device to host, and both directions at once.")
@click.option("--json", "as_json", is_flag=True, help="Write one line of JSON.")
def main(device: str, pieces_mib: str, both_ways: bool, as_json: bool) -> None:
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    pieces = sorted({*LARGE, *(int(piece) for piece in pieces_mib.split(",") if piece)})
    rates = Rates(
        device=device,
        bus=bus_rates(device, pieces),
        memory=memory_rate(device),
        down=down_rate(device) if both_ways else None,
        both=both_rate(device) if both_ways else None,
    )
    if as_json:
        click.echo(msgspec.json.encode(rates))
        return
    for piece, rate in rates.bus.items():
        click.echo(f"host to device in pieces of {piece} MiB: {rate / 1e9:.1f} GB/s")
    if rates.down is not None and rates.both is not None:
        click.echo(f"device to host: {rates.down / 1e9:.1f} GB/s; both at once, each: {rates.both / 1e9:.1f} GB/s")
    click.echo(f"within the device: {rates.memory / 1e9:.0f} GB/s read and written")


if __name__ == "__main__":
    main()
