"""Ceilings of a prompt's computation: the rate of a large product, and the time of attention to a contiguous prompt.

python -m tools.bench.engine.ceilings --heads 32 --kv-heads 8 --head-dim 128 --tokens 512 --tokens 8000
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec
import torch
from torch.nn.functional import scaled_dot_product_attention

from tools.bench.harness.apart import output_of

SIZE = {"cuda": 8192, "cpu": 512}  # rows and columns of the product's matrices
RUNS = 7  # the first two do not count
DTYPE = torch.bfloat16


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """`products`: floating-point operations a second. `attention`: seconds of one block's attention, by tokens."""

    products: float
    attention: dict[int, float]


def measured_apart(device: str, heads: int, kv_heads: int, head_dim: int, tokens: Sequence[int]) -> Ceilings:
    """Measures in a process of its own, so that this process holds no device memory."""
    options = [f"--device={device}", f"--heads={heads}", f"--kv-heads={kv_heads}", f"--head-dim={head_dim}"]
    said = output_of("engine.ceilings", *options, *(f"--tokens={count}" for count in tokens))
    return msgspec.json.decode(said, type=Ceilings, strict=False)


def product_rate(device: torch.device) -> float:
    size = SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(DTYPE) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device)


def attention_s(device: torch.device, heads: int, kv_heads: int, head_dim: int, tokens: int) -> float:
    """Causal attention, by torch. Its flash kernel takes 16-bit tensors on a GPU."""
    q = torch.randn(1, heads, tokens, head_dim, device=device).to(DTYPE)
    k, v = (torch.randn(1, kv_heads, tokens, head_dim, device=device).to(DTYPE) for _ in range(2))
    grouped = kv_heads != heads
    return _seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of some runs."""
    times = []
    for _ in range(RUNS):
        _settle(device)
        began = time.perf_counter()
        work()
        _settle(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@click.command(help=(__doc__ or "").split("\n\n", 1)[0])
@click.option("--device", default="auto", show_default=True)
@click.option("--heads", default=32, show_default=True)
@click.option("--kv-heads", default=8, show_default=True)
@click.option("--head-dim", default=128, show_default=True)
@click.option("--tokens", default=(512,), multiple=True, show_default=True)
def main(device: str, tokens: Sequence[int], **shape: Any) -> None:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    there = torch.device(device)
    with torch.inference_mode():
        attention = {count: attention_s(there, **shape, tokens=count) for count in tokens}
        click.echo(msgspec.json.encode(Ceilings(products=product_rate(there), attention=attention)))


if __name__ == "__main__":
    main()
