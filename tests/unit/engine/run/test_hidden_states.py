from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from djinnd.core.tuning import HEADS
from djinnd.device.cpu import CpuDevice
from djinnd.engine.run.hidden_states import HiddenStates

TOKENS, WIDTH = 8, 4


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1 << 20)
    yield device
    device.close()


def states_of(*numbers: float) -> Tensor:
    return torch.tensor(numbers)[:, None].expand(-1, WIDTH)


def test_hidden_states_of_a_step_are_fed_at_once_or_after_later_steps(device: CpuDevice) -> None:
    hidden = HiddenStates(device, "head", TOKENS, WIDTH, torch.float32)
    hidden.note(0, states_of(1, 2, 3))
    hidden.note(3, states_of(4))
    step = hidden.step
    first = hidden.keep([step + 1, step + 3])
    hidden.feed([step + 2, first[0]])
    assert torch.equal(hidden.previous[:2], states_of(3, 2))
    hidden.note(0, states_of(5, 6, 7, 8))
    second = hidden.keep([step])
    hidden.feed([*second, *first, step + 3])
    assert torch.equal(hidden.previous[:4], states_of(5, 2, 4, 8))
    hidden.feed_back(states_of(9))
    assert torch.equal(hidden.previous[:2], states_of(9, 2))


def test_places_are_given_back_and_used_again(device: CpuDevice) -> None:
    hidden = HiddenStates(device, "head", TOKENS, WIDTH, torch.float32)
    assert hidden.free == HEADS.places
    kept = hidden.keep([hidden.step, hidden.step + 1])
    hidden.give_back([*kept, hidden.step + 1])
    assert hidden.free == HEADS.places, "the place in the step is none of them"
    assert sorted(hidden.keep([hidden.step, hidden.step])) == sorted(kept)


def test_its_memory_is_of_the_budget(device: CpuDevice) -> None:
    used = device.budget.used
    hidden = HiddenStates(device, "head", TOKENS, WIDTH, torch.float32)
    assert device.budget.used - used == hidden.nbytes == (2 * TOKENS + HEADS.places) * WIDTH * 4
    hidden.release()
    assert device.budget.used == used
