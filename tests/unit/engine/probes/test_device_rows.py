from __future__ import annotations

import pytest
import torch

from djinn_client.errors import OutOfMemory
from djinnd.device.cpu import CpuDevice
from djinnd.engine.probes.device_rows import DeviceRows

ROW = 4 * 8


@pytest.fixture
def device() -> CpuDevice:
    device = CpuDevice(100 * ROW)
    yield device
    device.close()


@pytest.fixture
def rows(device: CpuDevice) -> DeviceRows:
    return DeviceRows(device, "rows", 8, torch.float32)


def test_no_memory_is_taken_before_the_first_rows(rows: DeviceRows, device: CpuDevice) -> None:
    assert rows.nbytes == device.budget.used == 0
    assert rows.take(3) == 0
    assert rows.nbytes == device.budget.used == 3 * ROW
    rows.give_back(0, 3)
    assert rows.nbytes == device.budget.used == 0


def test_rows_in_use_survive_growth(rows: DeviceRows) -> None:
    first = rows.take(2)
    rows.tensor[first : first + 2] = 7.0
    second = rows.take(5)
    assert second >= 2 and rows.capacity >= 7
    assert (rows.tensor[first : first + 2] == 7.0).all()
    rows.check_integrity()


def test_freed_rows_are_reused(rows: DeviceRows) -> None:
    places = [rows.take(3) for _ in range(4)]
    capacity = rows.capacity
    rows.give_back(places[2], 3)
    rows.give_back(places[1], 3)
    rows.check_integrity()
    assert rows.take(6) == places[1] and rows.capacity == capacity


def test_stretches_never_overlap(rows: DeviceRows) -> None:
    generator = torch.Generator().manual_seed(1)
    held: dict[int, int] = {}
    for _ in range(200):
        if held and int(torch.randint(2, (), generator=generator)):
            first = list(held)[int(torch.randint(len(held), (), generator=generator))]
            rows.give_back(first, held.pop(first))
        elif sum(held.values()) < 20:
            count = int(torch.randint(1, 4, (), generator=generator))
            held[rows.take(count)] = count
        rows.check_integrity()
        taken = sorted(row for first, count in held.items() for row in range(first, first + count))
        assert len(set(taken)) == len(taken) and (not taken or taken[-1] < rows.capacity)


def test_rows_at_hand_are_outside_the_budget_until_the_tensor_grows(device: CpuDevice) -> None:
    rows = DeviceRows(device, "rows", 8, torch.float32, at_hand=4)
    for _ in range(2):
        first = rows.take(3)
        rows.tensor[first : first + 3] = 7.0
        at_hand = rows.tensor
        assert (rows.capacity, rows.nbytes, device.budget.used) == (4, 0, 0)
        second = rows.take(2)
        assert rows.nbytes == device.budget.used == rows.capacity * ROW >= 5 * ROW
        assert (rows.tensor[first : first + 3] == 7.0).all()
        rows.check_integrity()
        rows.give_back(first, 3)
        rows.give_back(second, 2)
        assert rows.tensor is at_hand and device.budget.used == 0
    rows.release()
    assert rows.capacity == 0
    assert rows.take(2) == 0 and rows.nbytes == device.budget.used == 2 * ROW


def test_a_full_budget_is_refused_with_its_figures_and_nothing_changes(rows: DeviceRows) -> None:
    rows.take(60)
    with pytest.raises(OutOfMemory, match="rows") as refused:
        rows.take(50)
    assert refused.value.data["needed"] >= 110 * ROW
    assert rows.capacity == 60
    rows.check_integrity()
    rows.give_back(0, 60)
    assert rows.take(100) == 0
