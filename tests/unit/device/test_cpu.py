from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from djinn_client.errors import OutOfMemory
from djinn_client.transport.host_memory import Bound
from djinnd.device import cpu
from djinnd.device.cpu import CpuDevice


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1 << 20)
    yield device
    device.close()


class Gate(Tensor):
    """A tensor whose copy waits until the test opens the gate."""

    gate: threading.Event

    @staticmethod
    def closed(values: Tensor) -> Gate:
        gated = values.as_subclass(Gate)
        gated.gate = threading.Event()
        return gated

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is Tensor.copy_:
            assert args[1].gate.wait(60)
            return func(args[0], args[1].as_subclass(Tensor))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_copy_is_done_when_its_event_has_passed(device: CpuDevice) -> None:
    target, source = torch.zeros(1000), torch.arange(1000.0)
    device.copy(target, source).wait()
    assert torch.equal(target, source)


def test_dtypes_may_differ(device: CpuDevice) -> None:
    target, source = torch.zeros(8), torch.arange(8, dtype=torch.bfloat16)
    device.copy(target, source).order()
    assert torch.equal(target, source.float())


def test_copies_happen_in_the_order_queued_and_the_caller_does_not_wait(device: CpuDevice) -> None:
    """The last copy queued into a target wins, and a copy waits for the copies before it."""
    target = torch.zeros(4)
    first = Gate.closed(torch.ones(4))
    device.copy(target, first)
    last = device.copy(target, torch.full((4,), 2.0))
    assert target.tolist() == [0.0] * 4  # both are queued, neither is done
    first.gate.set()
    last.wait()
    assert target.tolist() == [2.0] * 4


def test_synchronize_waits_for_all_queued_copies(device: CpuDevice) -> None:
    targets = [torch.zeros(1000) for _ in range(50)]
    for number, target in enumerate(targets):
        device.copy(target, torch.full((1000,), float(number)))
    device.synchronize()
    assert [target[-1].item() for target in targets] == list(range(50))


def test_a_copy_s_error_is_raised_only_to_its_own_waiter(device: CpuDevice) -> None:
    broken = device.copy(torch.zeros(3), torch.zeros(4))
    target = torch.zeros(3)
    sound = device.copy(target, torch.ones(3))
    sound.wait()
    assert target.tolist() == [1.0] * 3
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            broken.wait()
    with pytest.raises(RuntimeError, match="size"):
        broken.order()
    device.synchronize()


def test_tensors_made_in_inference_mode_can_be_copied_to(device: CpuDevice) -> None:
    with torch.inference_mode():
        target = torch.zeros(3)
    device.copy(target, torch.ones(3)).wait()
    assert target.tolist() == [1.0] * 3


def test_memory_is_under_the_budget(device: CpuDevice) -> None:
    first = device.allocate("first", (512, 256), torch.float32)
    assert first.shape == (512, 256) and device.budget.used == 1 << 19
    with pytest.raises(
        OutOfMemory, match=r"second needs 0\.6 MiB of device memory; 0\.5 MiB of the budget of 1\.0 MiB"
    ):
        device.allocate("second", (320, 1024), torch.bfloat16)
    device.release("first")
    assert device.budget.used == 0
    assert bool((device.allocate("second", (320, 1024), torch.bfloat16, zero=True) == 0).all())


def test_zeroed_memory_takes_host_memory_only_where_it_is_touched() -> None:
    """Otherwise every load would write the whole pool of a model, and keep all of it from then on."""
    device = CpuDevice(1 << 30)
    before = resident_bytes()
    pool = device.allocate("pool", (1 << 20, 256), torch.float32, zero=True)
    assert resident_bytes() - before < 64 << 20
    assert pool.dtype == torch.float32 and not pool[::4096].any()
    pool[-1] = 7.0
    assert pool[-1].eq(7.0).all() and not pool[-2].any()
    assert device.allocate("none", (0, 4), torch.bfloat16, zero=True).shape == (0, 4)
    device.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_refused_by_the_allocator_is_not_reserved() -> None:
    device = CpuDevice(1 << 62)
    with pytest.raises(RuntimeError):
        device.allocate("too much", (1 << 61,), torch.uint8)
    assert device.budget.used == 0
    device.close()


def test_the_default_budget_is_a_share_of_available_memory() -> None:
    device = CpuDevice(0)
    with open("/proc/meminfo") as meminfo:
        total = int(meminfo.readline().split()[1]) * 1024
    assert 0 < device.budget.total < total
    device.close()


def test_staging_is_host_memory_in_bytes(device: CpuDevice) -> None:
    staging = device.staging(100)
    assert (staging.dtype, staging.numel(), staging.device.type) == (torch.uint8, 100, "cpu")


def test_pinning_changes_nothing_here(device: CpuDevice) -> None:
    piece = torch.arange(4096, dtype=torch.uint8)
    before = piece.clone()
    device.pin([piece])
    device.unpin([piece])
    assert torch.equal(piece, before)


def test_close_ends_the_copy_thread() -> None:
    before = threading.active_count()
    device = CpuDevice(1 << 20)
    assert threading.active_count() == before + 1
    device.close()
    assert threading.active_count() == before


def test_a_copy_runs_after_the_computation_that_it_waits_for(device: CpuDevice) -> None:
    target = torch.zeros(8)
    read = target.clone()
    mark = device.mark()  # this thread computes, so its work is done
    device.copy(target, torch.ones(8), mark).wait()
    assert read.tolist() == [0.0] * 8 and target.tolist() == [1.0] * 8


def test_computing_waits_for_expected_copies(device: CpuDevice) -> None:
    target, source = torch.zeros(8), Gate.closed(torch.ones(8))
    device.expect(device.copy(target, source))
    with device.computing(late=True):
        assert device.is_behind and target.tolist() == [0.0] * 8
    threading.Timer(0.05, source.gate.set).start()
    with device.computing():
        assert target.tolist() == [1.0] * 8 and not device.is_behind


def test_catch_up_and_mark_wait_for_expected_copies(device: CpuDevice) -> None:
    for wait in (device.catch_up, device.mark):
        target, source = torch.zeros(8), Gate.closed(torch.ones(8))
        device.expect(device.copy(target, source))
        threading.Timer(0.05, source.gate.set).start()
        wait()
        assert target.tolist() == [1.0] * 8 and not device.is_behind


def test_work_done_aside_is_complete_when_the_context_ends(device: CpuDevice) -> None:
    with device.side_stream():
        out = torch.ones(8) * 2
    assert out.tolist() == [2.0] * 8


def test_rates_are_measured_once(device: CpuDevice) -> None:
    rates = device.rates()
    assert min(rates.bus, rates.memory, rates.reading, rates.launch, *rates.products.values()) > 0
    assert device.rates() is rates
    assert device.budget.used == 0


def test_the_budget_may_change_while_memory_is_reserved(device: CpuDevice) -> None:
    device.allocate("held", (1 << 19,), torch.uint8)
    device.resize(1 << 19)
    with pytest.raises(OutOfMemory):
        device.allocate("more", (1,), torch.uint8)
    with pytest.raises(OutOfMemory, match="in use"):
        device.resize(1 << 18)
    device.resize(1 << 21)
    device.allocate("more", (1 << 20,), torch.uint8)


def test_an_untouched_pool_counts_as_promised_memory() -> None:
    """The kernel still counts it as available."""
    device = CpuDevice(1 << 30)
    assert device.untouched_host_bytes == 0
    pool = device.allocate("pool", (512 << 20,), torch.uint8, zero=True)
    before = device.untouched_host_bytes
    assert (512 << 20) - (64 << 20) <= before <= 512 << 20
    pool[: 256 << 20].fill_(1)
    assert before - device.untouched_host_bytes > 128 << 20
    device.close()


def test_a_budget_beyond_available_memory_is_kept_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "tightest", lambda: Bound(100 << 20, "the control group /x"))
    device, own = CpuDevice(1 << 30), CpuDevice(0)
    assert (device.budget.total, own.budget.total) == (1 << 30, 50 << 20)
    assert [record.getMessage() for record in caplog.records] == [
        "memory_overcommitted budget=1073741824 available=104857600 bound=the control group /x"
    ]
    for each in (device, own):
        each.close()


def test_the_copying_thread_computes_alone_and_new_threads_as_before() -> None:
    before, found = torch.get_num_threads(), dict[str, int]()

    class Target:
        def copy_(self, source: object) -> None:
            found["copying"] = torch.get_num_threads()

    torch.set_num_threads(2)
    device = CpuDevice(1 << 20)
    try:
        device.copy(Target(), torch.empty(0)).wait()  # type: ignore[arg-type]
        new = threading.Thread(target=lambda: found.update(new=torch.get_num_threads()))
        new.start()
        new.join()
        assert found == {"copying": 1, "new": 2} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        device.close()
