"""The device: memory under a budget, streams, events, pinned host memory, and the queues of copies.

CUDA, and a CPU that plays the device: with a real pool, real copies in a thread of their own, and real events, so that
everything above runs the same code on both.
"""

from __future__ import annotations

from djinnd.device.device import Device, Event, Lane, Mark, Pinning, Rates
from djinnd.device.trace import Stamp, Trace


def open_device(name: str, memory: int) -> Device:
    """`name`: auto, cpu or cuda:N. `memory`: the hard budget in bytes, 0 for the device's own default.

    Raises djinn_client.errors.InvalidRequest for a device that is not there, OutOfMemory for a budget that it lacks.
    """
    from djinnd.device.cpu import CpuDevice
    from djinnd.device.cuda import CudaDevice

    if name == "auto":
        name = "cuda:0" if CudaDevice.available() else "cpu"
    return CpuDevice(memory) if name == "cpu" else CudaDevice(name, memory)


__all__ = ["Device", "Event", "Lane", "Mark", "Pinning", "Rates", "Stamp", "Trace", "open_device"]
