"""The speeds of a device, as it measured them itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    bus: float  # bytes/s from pinned host memory to the device
    memory: float  # bytes/s, read plus written, of a copy inside device memory
    reading: float  # bytes/s of weights that a matrix product with one row reads, at least those of the copy
    products: dict[str, float]  # floating-point operations/s of a large matrix product, by dtype as in "bfloat16"
    launch: float  # seconds of a small kernel in a chain of them, each launched by the host
