from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from djinn_client.protocol import Span
from djinnd.device import CopyLane, DeviceTrace
from djinnd.device.cpu import CpuDevice
from tests.support.troubled import TroubledDevice


@dataclass
class Passed:
    """A stamp whose time the test sets. `at` None: not passed yet."""

    at: float | None

    @property
    def passed(self) -> bool:
        return self.at is not None

    def since(self, earlier: Passed) -> float:
        assert self.at is not None and earlier.at is not None
        return self.at - earlier.at


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.trace = DeviceTrace(lambda: Passed(self.now))

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None:
        self.now = start
        self.trace.begin(track, name, **args)
        self.now = end
        self.trace.end(track)


def read(trace: DeviceTrace) -> list[Span]:
    trace.read(999)
    return trace.spans()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device() -> Iterator[TroubledDevice]:
    device = TroubledDevice(1 << 20)
    yield device
    device.let_go()
    device.close()


def test_spans_are_sorted_by_their_start(clock: Clock) -> None:
    clock.trace.begin("step", "step", rows=2)
    clock.span("compute", "prologue", 1010, 1030)
    clock.span("compute", "block 0", 1030, 1075.5)
    clock.now = 1100
    clock.trace.end("step")
    clock.trace.add("copy", "block 1", Passed(1005), Passed(1050), bytes=7)
    assert read(clock.trace) == [
        Span("step", "step", 0.0, 100.0, {"rows": 2}),
        Span("copy", "block 1", 5.0, 45.0, {"bytes": 7}),
        Span("compute", "prologue", 10.0, 20.0),
        Span("compute", "block 0", 30.0, 45.5),
    ]


def test_the_earliest_span_begins_at_0_even_if_it_was_added_later(clock: Clock) -> None:
    clock.span("compute", "block 0", 1010, 1020)
    clock.span("copy", "block 1", 990, 1030)
    assert [(span.name, span.start_us) for span in read(clock.trace)] == [("block 1", 0.0), ("block 0", 20.0)]


def test_a_span_that_never_ended_is_left_out(clock: Clock) -> None:
    """Its work failed, and the next step opens the track again."""
    clock.trace.begin("compute", "block 0")
    clock.span("compute", "block 1", 1010, 1020)
    clock.trace.begin("compute", "block 2")
    assert [span.name for span in read(clock.trace)] == ["block 1"]
    assert read(Clock().trace) == []


def test_reading_stops_at_spans_not_passed_yet_and_at_the_given_number(clock: Clock) -> None:
    trace, late, later = clock.trace, Passed(None), Passed(None)
    assert trace.is_read and trace.read(9) == 0
    clock.span("compute", "block 0", 1010, 1020)
    trace.add("copy", "block 1", Passed(1000), late)
    trace.add("copy", "block 2", Passed(1000), later)
    clock.span("compute", "block 1", 1020, 1030)
    later.at = 1001
    assert (trace.read(9), trace.read(9)) == (1, 0) and not trace.is_read, "the second is late"
    with pytest.raises(AssertionError):
        trace.spans()
    late.at = 1001
    assert (trace.read(2), trace.read(2), trace.read(2)) == (2, 1, 0) and trace.is_read
    assert [span.name for span in trace.spans()] == ["block 1", "block 2", "block 0", "block 1"]


def test_a_device_without_a_trace_records_nothing(device: CpuDevice) -> None:
    with device.span("compute", "prologue"):
        device.copy(torch.zeros(4), torch.ones(4)).wait()
    device.trace = trace = DeviceTrace(device.stamp)
    device.trace = None
    with device.span("compute", "prologue"):
        device.copy(torch.zeros(4), torch.ones(4)).wait()
    assert trace.spans() == []


def test_copies_and_compute_of_a_cpu_are_on_one_clock(device: TroubledDevice) -> None:
    device.trace = trace = DeviceTrace(device.stamp)
    with device.span("compute", "before"):
        pass
    device.gate.clear()
    event = device.copy(torch.zeros(4), torch.ones(4), name="block 3")
    with device.span("compute", "beside"):
        assert trace.read(9) == 1 and not trace.is_read, "the copy waits at the gate"
    device.let_go()
    event.wait()
    with device.span("compute", "after"):
        pass
    spans = {span.name: span for span in read(trace)}
    before, copy, beside, after = (spans[name] for name in ("before", "block 3", "beside", "after"))
    assert (copy.track, copy.args, beside.track) == ("copy", {"bytes": 16}, "compute")
    assert end(before) <= copy.start_us and end(copy) <= after.start_us
    assert end(beside) < end(copy) and copy.duration_us > 0


def test_each_lane_has_a_track() -> None:
    device = CpuDevice(1 << 20)
    device.trace = trace = DeviceTrace(device.stamp)
    for lane in CopyLane:
        device.copy(torch.zeros(4), torch.ones(4), lane=lane).wait()
    device.close()
    assert [span.track for span in read(trace)] == ["copy", "pages up", "pages down"]


def test_a_copy_belongs_to_the_trace_in_which_it_was_queued(device: TroubledDevice) -> None:
    """Even if it happens later, or fails."""
    source = torch.ones(4)
    device.gate.clear()
    device.fail(source)
    device.trace = trace = DeviceTrace(device.stamp)
    broken = device.copy(torch.zeros(4), source, name="broken")
    device.trace = None
    sound = device.copy(torch.zeros(4), torch.ones(4), name="of no trace")
    device.let_go()
    with pytest.raises(OSError, match="caught fire"):
        broken.wait()
    sound.wait()
    assert [span.name for span in read(trace)] == ["broken"]


def test_failed_work_has_no_span(device: CpuDevice) -> None:
    device.trace = trace = DeviceTrace(device.stamp)
    with pytest.raises(ValueError, match="in mid-way"), device.span("compute", "block 0"):
        raise ValueError("in mid-way")
    with device.span("compute", "block 0"):
        pass
    assert len(read(trace)) == 1


def test_any_thread_may_copy_during_a_trace(device: CpuDevice) -> None:
    device.trace = trace = DeviceTrace(device.stamp)
    copying = [
        threading.Thread(target=lambda: [device.copy(torch.zeros(4), torch.ones(4)) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in copying:
        thread.start()
    for thread in copying:
        thread.join()
    device.synchronize()
    assert sum(span.track == "copy" for span in read(trace)) >= 200


def end(span: Span) -> float:
    return span.start_us + span.duration_us
