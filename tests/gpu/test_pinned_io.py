from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.model.copies.pinned_io import ResultReader, send
from djinnd.model.step.inputs import StepInputs
from tests.support.cuda import cuda_device

pytestmark = pytest.mark.gpu

BULK = 1 << 30  # bytes, which the bus carries in twenty milliseconds


@pytest.fixture(scope="module")
def bulk() -> Iterator[tuple[Tensor, Tensor]]:
    """BULK bytes on the host and on the device."""
    host = torch.empty(BULK, dtype=torch.uint8, pin_memory=True)
    yield host, torch.zeros(BULK, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()


def begin(target: Tensor, source: Tensor) -> torch.cuda.Event:
    """Begins the copy on a stream of its own."""
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        event.record()
    return event


def test_each_send_copies_the_current_contents(bulk: tuple[Tensor, Tensor]) -> None:
    host, device = bulk
    for numbers in (1, 3, 1024, 1025, 50_000):
        staging = torch.empty(8 * numbers, dtype=torch.uint8, pin_memory=True)
        target = torch.zeros_like(staging, device="cuda")
        begin(device, host)
        for number in range(20):
            staging.view(torch.int64)[:] = torch.arange(numbers) * 1_000_003 + number
            send(target, staging)
            torch.cuda.current_stream().synchronize()
            assert torch.equal(target.cpu(), staging)


def test_a_send_does_not_wait_for_copies_on_another_stream(bulk: tuple[Tensor, Tensor]) -> None:
    host, device = bulk
    staging = torch.ones(4096, dtype=torch.uint8, pin_memory=True)
    target = torch.zeros_like(staging, device="cuda")
    send(target, staging)  # compiles
    all_of_it = begin(device, host)
    send(target, staging)
    torch.cuda.current_stream().synchronize()
    assert not all_of_it.query()


def test_a_read_does_not_wait_for_copies_on_another_stream(bulk: tuple[Tensor, Tensor]) -> None:
    host, device = bulk
    inbox, seen = ResultReader(), list[bool]()
    values = torch.arange(5, device="cuda")
    assert inbox.read(inbox.ask(values), lambda: False) == [0, 1, 2, 3, 4]  # compiles
    all_of_it = begin(host, device)
    assert inbox.read(inbox.ask(values), lambda: bool(seen.append(all_of_it.query()))) == [0, 1, 2, 3, 4]
    assert seen == [False] and not all_of_it.query()


def test_meanwhile_is_called_again_while_the_device_is_busy() -> None:
    inbox, calls = ResultReader(), list[int]()
    values = torch.arange(5, device="cuda")

    def there_is_more() -> bool:
        calls.append(0)
        return True

    def calls_beside(cycles: int) -> int:
        torch.cuda.synchronize()
        calls.clear()
        torch.cuda._sleep(cycles)
        assert inbox.read(inbox.ask(values), there_is_more) == [0, 1, 2, 3, 4]
        return len(calls)

    some_ten_milliseconds = 50_000_000
    assert calls_beside(some_ten_milliseconds) == 1, "nobody knows yet how long it takes"
    assert calls_beside(some_ten_milliseconds) > 1  # busy cores let it look seldom
    assert calls_beside(1) < 5


def test_inputs_are_filled_again_when_the_device_has_taken_them() -> None:
    """The device is busy first, as it is with the chunk before in a long prompt."""
    with cuda_device() as device:
        inputs, seen = StepInputs(device, 4, 1, 2), []
        with device.computing():
            inputs.send()  # compiles
            for number in range(5):
                torch.cuda._sleep(50_000_000)  # cycles: some ten milliseconds
                inputs.wait()
                inputs.host["ids"][:] = number
                inputs.send()
                seen.append(inputs.ids.clone())
        device.synchronize()
        assert [ids.unique().tolist() for ids in seen] == [[number] for number in range(5)]


def test_a_read_may_have_more_numbers_than_the_one_before() -> None:
    inbox = ResultReader()
    for count in (1, 2, 7, 300, 4, 4097):
        values = torch.randint(-(1 << 62), 1 << 62, (count,), device="cuda")
        assert inbox.read(inbox.ask(values), lambda: False) == values.tolist()
        assert inbox.read(inbox.ask(values[::2]), lambda: False) == values[::2].tolist()
    assert inbox.read(inbox.ask(values[:0]), lambda: False) == []
