from __future__ import annotations

import torch

from djinnd.model.crossing import Inbox, send


def test_without_a_bus_it_is_a_copy() -> None:
    source = torch.arange(24, dtype=torch.uint8)
    target = torch.zeros(24, dtype=torch.uint8)
    send(target, source)
    assert target.tolist() == source.tolist()


def test_what_is_to_be_done_meanwhile_is_done_once_for_each_reading() -> None:
    inbox, done = Inbox(), list[str]()
    assert inbox.read(torch.tensor([3, -1]), lambda: bool(done.append("a"))) == [3, -1]
    assert inbox.read(torch.tensor([], dtype=torch.int64), lambda: bool(done.append("b"))) == []
    assert done == ["a", "b"]
