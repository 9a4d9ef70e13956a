"""Messages to the child process that inspects a checkpoint before the engine reads it: see engine/load/inspection.py.

    server ──Inspect, with the open files──► child ──Planned | ImageDescribed | Passed | Failed──► server

The child's first message is Confined. It exits after its answer.
"""

from __future__ import annotations

import msgspec

from djinnd.core.rates import Rates
from djinnd.messages.directions import CallAnswer, EngineCall
from djinnd.messages.models import DescribeImage, Plan


class DeviceFigures(msgspec.Struct, frozen=True):
    """The figures of a device that a plan depends on."""

    kind: str  # torch.device.type: cpu or cuda
    budget_bytes: int
    free_bytes: int  # of the budget, with those that the inspected model has itself
    reserved_bytes: int
    rates: Rates
    max_batch_tokens: int


class DescribeDevice(EngineCall["DeviceDescribed"], tag="describe_device"):
    """Asks an engine for the figures of its device, for an inspection of `model`. Answered by DeviceDescribed."""

    model: str
    held_bytes: int = 0  # as in Plan


class DeviceDescribed(CallAnswer, tag="device_described"):
    figures: DeviceFigures


class Inspect(msgspec.Struct, tag="inspect"):
    """`is_plan`: True asks for the whole plan, False only for whether the checkpoint passes."""

    job: Plan | DescribeImage
    figures: DeviceFigures
    is_plan: bool = True


class Confined(msgspec.Struct, tag="confined"):
    """`lacking`: the parts of the sandbox that this machine cannot provide, "" if it provides all. The child is
    confined by the parts that exist."""

    lacking: str = ""


class Passed(msgspec.Struct, tag="passed"):
    """The checkpoint passed: the engine may build the model."""
