"""A device: memory under a budget, streams, events, pinned host memory, and copy queues.

There is a CUDA device and a CPU device. The CPU device has a real pool, real copies in a thread, and real events, so
the layers above run the same code on both.
"""

from __future__ import annotations

from djinnd.device.device import CopyLane, Device, Event, Pinning, StreamMark
from djinnd.device.trace import DeviceTrace, Stamp


def open_device(name: str, memory: int) -> Device:
    """Opens a device. `name`: auto, cpu or cuda:N. `memory`: the hard budget in bytes; 0: the device's own default.

    Raises InvalidRequest if there is no such device, OutOfMemory if it has less memory than the budget.
    """
    from djinnd.device.cpu import CpuDevice
    from djinnd.device.cuda import CudaDevice

    if name == "auto":
        name = "cuda:0" if CudaDevice.available() else "cpu"
    return CpuDevice(memory) if name == "cpu" else CudaDevice(name, memory)


__all__ = ["CopyLane", "Device", "DeviceTrace", "Event", "Pinning", "Stamp", "StreamMark", "open_device"]
