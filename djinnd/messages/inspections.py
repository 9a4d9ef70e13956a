"""What is asked of the child process that inspects a checkpoint before the engine sees it: see engine/inspection.py.

    server ──Inspect, with the open files──► child ──Planned | ImageDescribed | Passed | Failed──► server

The child's first word is Confined; it ends when it has answered.
"""

from __future__ import annotations

import msgspec

from djinnd.messages.models import DescribeImage, Plan


class DeviceFigures(msgspec.Struct, frozen=True):
    """What a plan needs to know of a device."""

    kind: str  # of torch.device: cpu or cuda
    budget_bytes: int
    reserved_bytes: int
    bus: float  # as in Rates
    memory: float
    products: float
    max_batch_tokens: int


class DescribeDevice(msgspec.Struct, tag="describe_device"):
    """Asked of an engine, for an inspection of `model`. Answered by DeviceDescribed."""

    request: int
    model: str


class DeviceDescribed(msgspec.Struct, tag="device_described"):
    request: int
    figures: DeviceFigures


class Inspect(msgspec.Struct, tag="inspect"):
    """`is_plan`: the whole plan is wanted, and else only whether the checkpoint passes."""

    job: Plan | DescribeImage
    figures: DeviceFigures
    is_plan: bool = True


class Confined(msgspec.Struct, tag="confined"):
    """`lacking`: what this machine lacks of the sandbox, which is closed as far as it goes; "": nothing."""

    lacking: str = ""


class Passed(msgspec.Struct, tag="passed"):
    """The engine may build the model."""
