"""Rates of the host's cores beside the bus: products of a block's MLP alone, and while the bus is busy.

    python -m tools.bench.stream.host_rates CHECKPOINT [--device cuda:0]

Runs in a process of its own, with djinnd's own products and measurement. The weights are random numbers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
import msgspec
import torch

from djinnd.device import open_device
from djinnd.model.placing.beside_bus import measured
from djinnd.model.placing.host_mlp import Cores, HostMlp
from tools.bench.harness.apart import output_of

COPY_BYTES = 256 << 20  # of the buffer that keeps the bus busy
DEVICE_BYTES = 1 << 30  # of device memory for this process
RUNS = 5  # of a product alone; the fastest counts


class HostRates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second. The host's are bytes of bfloat16 weights, by rows that are multiplied."""

    bus: float
    bus_beside: float  # while the host multiplies
    host: dict[int, float]
    host_beside: dict[int, float]  # while the bus is busy
    threads: int


def measured_apart(checkpoint: Path, device: str) -> HostRates:
    said = output_of("stream.host_rates", str(checkpoint), f"--device={device}", "--json")
    return msgspec.json.decode(said, type=HostRates, strict=False)


@torch.inference_mode()
def measure(width: int, inner: int, device_name: str) -> HostRates:
    device = open_device(device_name, DEVICE_BYTES + (2 << 30 if device_name != "cpu" else 0))
    try:
        Cores(device).use()
        mlp = HostMlp("mlp", torch.nn.functional.silu)
        gate_up, down = (torch.randn(*shape).mul_(0.02).bfloat16() for shape in ((2 * inner, width), (width, inner)))
        mlp.bind(gate_up, down, None)
        source = device.staging(COPY_BYTES).fill_(1)
        target = device.allocate("target", (COPY_BYTES,), torch.uint8)
        found = measured(device, mlp, (target, source), width, torch.bfloat16)
        nbytes = gate_up.nbytes + down.nbytes
        alone = {rows: nbytes / _seconds(mlp, rows, width) for rows in found.mlp_s}
        beside = {rows: nbytes / seconds for rows, seconds in found.mlp_s.items()}
        return HostRates(
            bus=found.bus,
            bus_beside=found.bus_beside,
            host=alone,
            host_beside=beside,
            threads=torch.get_num_threads(),
        )
    finally:
        device.close()


def _seconds(mlp: HostMlp, rows: int, width: int) -> float:
    x, times = torch.randn(rows, width).bfloat16(), []
    for _ in range(RUNS):
        began = time.perf_counter()
        mlp.multiply(x)
        times.append(time.perf_counter() - began)
    return min(times)


@click.command(help=(__doc__ or "").split("\n\n", 1)[0])
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--device", default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Write one line of JSON.")
def main(checkpoint: Path, device: str, as_json: bool) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    rates = measure(config["hidden_size"], config["intermediate_size"], device)
    if as_json:
        click.echo(msgspec.json.encode(rates))
        return
    click.echo(f"the bus alone: {rates.bus / 1e9:.1f} GB/s; beside the host: {rates.bus_beside / 1e9:.1f}")
    for rows, rate in rates.host.items():
        told = (
            f"{rows} rows: {rate / 1e9:.1f} GB/s of weights alone, {rates.host_beside[rows] / 1e9:.1f} beside the bus"
        )
        click.echo(f"the host's {rates.threads} threads, {told}")


if __name__ == "__main__":
    main()
