"""Rates of the host's cores beside the bus: products of a block's MLP alone, and while the bus is busy.

    python -m tools.bench.stream.host_rates CHECKPOINT [--device cuda:0] [--form int8]

Runs in a process of its own, with djinnd's own products and measurement. The weights are random numbers.

    bf16         plain
    int8         as `quantise: int8` makes it: a scale for each 128 columns of a row
    int8-rows    a scale for each row
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
import torch

from djinnd.device import open_device
from djinnd.model.placing.beside_bus import measured
from djinnd.model.placing.host_matrix import HostMatrix, PlainMatrix, int8_matrix
from djinnd.model.placing.host_mlp import Cores, HostMlp
from djinnd.weights.forms.codings import Scaled
from djinnd.weights.forms.quantise import CODINGS, encode
from tools.bench.harness.apart import output_of

FORMS = {"bf16": torch.bfloat16, "int8": torch.int8, "int8-rows": torch.int8}
COPY_BYTES = 256 << 20  # of the buffer that keeps the bus busy
DEVICE_BYTES = 1 << 30  # of device memory for this process
MLPS = 3  # in turns, as one alone would stay in the cache in part
RUNS = 6  # of a product alone; the median counts


class HostRates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second. The host's are bytes of weights in their form, by rows that are multiplied."""

    bus: float
    bus_beside: float  # while the host multiplies
    host: dict[int, float]
    host_beside: dict[int, float]  # while the bus is busy
    threads: int


def measured_apart(checkpoint: Path, device: str, form: str = "bf16") -> HostRates:
    said = output_of("stream.host_rates", str(checkpoint), f"--device={device}", f"--form={form}", "--json")
    return msgspec.json.decode(said, type=HostRates, strict=False)


@torch.inference_mode()
def measure(width: int, inner: int, device_name: str, form: str = "bf16") -> HostRates:
    device = open_device(device_name, DEVICE_BYTES + (2 << 30 if device_name != "cpu" else 0))
    try:
        Cores(device).use()
        mlps = [HostMlp("mlp", torch.nn.functional.silu) for _ in range(MLPS)]
        for mlp in mlps:
            mlp.bind(random_matrix(form, 2 * inner, width), random_matrix(form, width, inner), None)
        source = device.staging(COPY_BYTES).fill_(1)
        target = device.allocate("target", (COPY_BYTES,), torch.uint8)
        found = measured(device, mlps, (target, source), width, torch.bfloat16)
        nbytes = 3 * width * inner * FORMS[form].itemsize
        alone = {rows: nbytes / _seconds(mlps, rows, width) for rows in found.mlp_s}
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


def random_matrix(form: str, rows: int, cols: int) -> HostMatrix:
    weights = torch.randn(rows, cols).mul_(0.02)
    if form == "bf16":
        return PlainMatrix(weights.bfloat16())
    coding = CODINGS["int8"] if form == "int8" else Scaled(torch.int8, 1)
    parts = [torch.empty((1, *part.shape), dtype=part.dtype) for part in coding.parts(rows, cols)]
    encode(coding, weights[None], parts)
    return int8_matrix(coding, parts, torch.bfloat16)


def _seconds(mlps: Sequence[HostMlp], rows: int, width: int) -> float:
    x, times = torch.randn(rows, width).bfloat16(), []
    for turn in range(RUNS):
        began = time.perf_counter()
        mlps[turn % len(mlps)].multiply(x)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@click.command(help=(__doc__ or "").split("\n\n", 1)[0])
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--device", default="auto", show_default=True)
@click.option("--form", type=click.Choice(list(FORMS)), default="bf16", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Write one line of JSON.")
def main(checkpoint: Path, device: str, form: str, as_json: bool) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    rates = measure(config["hidden_size"], config["intermediate_size"], device, form)
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
