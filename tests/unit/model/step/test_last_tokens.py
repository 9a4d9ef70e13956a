from __future__ import annotations

import torch

from djinnd.device.cpu import CpuDevice
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.last_tokens import LastTokens
from tests.support.loaded import MEMORY

CPU = torch.device("cpu")


def test_negative_ids_become_the_tokens_and_others_stay() -> None:
    last = LastTokens(4, CPU)
    last.keep(torch.tensor([7, 0, 9]))
    ids = torch.tensor([-3, -1, 0, 500, -2])
    last.feed(ids)
    assert ids.tolist() == [9, 7, 0, 500, 0]


def test_an_unsound_row_is_fed_token_0() -> None:
    last = LastTokens(2, CPU)
    last.keep(torch.tensor([-1, 5]))
    ids = torch.tensor([-1, -2])
    last.feed(ids)
    assert ids.tolist() == [0, 5]


def test_inputs_feed_their_ids_when_they_are_sent() -> None:
    device, last = CpuDevice(MEMORY), LastTokens(2, CPU)
    last.keep(torch.tensor([11, 12]))
    inputs = StepInputs(device, 3, 3, 1, last_tokens=last)
    inputs.host["ids"][:] = (-2, 6, -1)
    inputs.host["starts"][:] = range(4)
    inputs.host["lengths"][:] = 1
    inputs.send()
    assert inputs.ids.tolist() == [[12, 6, 11]]
    device.close()
