"""Traces of the device's streams: eager steps, captured steps, and copies beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinn_client.protocol import Placing
from djinnd import messages
from djinnd.device import DeviceTrace
from djinnd.device.cuda import CudaDevice
from tests.support.cuda import cuda_device
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model
from tests.support.traces import check_streaming, ended

pytestmark = pytest.mark.gpu

ROUNDING_US = 2.0  # a little more than the resolution of the device's events


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    with cuda_device() as device:
        yield device


@pytest.mark.parametrize(
    "placing",
    [Placing(resident=1, packing=False), Placing(resident=1, slots=2, piece_bytes=200_000), Placing(resident=4)],
    ids=["plain", "two slots in pieces", "half"],
)
def test_each_streamed_block_is_copied_once_a_step_and_never_over_a_block_that_computes(
    device: CudaDevice, placing: Placing
) -> None:
    with EngineThread(device, max_batch_tokens=128, max_rows=16) as engine:
        check_streaming(engine, placing, steps=8, rounding_us=ROUNDING_US)


def test_captured_steps_of_a_resident_model_have_a_span_a_block(device: CudaDevice) -> None:
    with EngineThread(device, max_batch_tokens=128, max_rows=16) as engine:
        blocks = engine.loaded(reduced_model("llama-2"), max_context=512).blocks
        engine.open("s")
        engine.outcome(engine.run("s", random_prompt(40, 512, 0), 8))
        engine.send(messages.Trace(99, 4, seconds=60.0), engine.run_message("s", random_prompt(1, 512, 1), 8))
        spans = engine.until(messages.Traced, messages.Stepped, messages.Finished).spans
    names = ["prologue", *(f"block {index}" for index in range(blocks)), "epilogue"]
    assert [span.name for span in spans if span.track == "compute"] == names * 4
    assert all(span.duration_us >= 0 for span in spans)
    assert not [span for span in spans if span.track == "copy"]


def test_a_copy_is_measured_on_its_own_stream(device: CudaDevice) -> None:
    """Copies 64 MiB from pinned memory behind a mark. The span includes neither the wait nor the host's time."""
    source = device.staging(64 << 20)
    target = torch.empty_like(source, device=device.torch_device)
    device.copy(target, source).wait()
    device.trace = trace = DeviceTrace(device.stamp)
    with device.computing(), device.span("compute", "before"):
        torch.cuda._sleep(50_000_000)
    event = device.copy(target, source, device.mark(), "block 3")
    assert trace.read(9) == 0, "recording waits for nothing"
    event.wait()
    assert trace.read(9) == 2 and trace.is_read
    before, copy = trace.spans()
    assert (before.name, copy.name, copy.args) == ("before", "block 3", {"bytes": 64 << 20})
    assert ended(before) <= copy.start_us + ROUNDING_US
    assert 1e9 < copy.args["bytes"] / (copy.duration_us / 1e6) < 1e12
