from __future__ import annotations

import torch

from djinnd.model.copies.pinned_io import ResultReader, send


def test_on_a_cpu_a_send_is_a_copy() -> None:
    source = torch.arange(24, dtype=torch.uint8)
    target = torch.zeros(24, dtype=torch.uint8)
    send(target, source)
    assert target.tolist() == source.tolist()


def test_on_a_cpu_meanwhile_is_called_once_a_read() -> None:
    inbox, done = ResultReader(), list[str]()
    one, other = inbox.ask(torch.tensor([3, -1])), inbox.ask(torch.tensor([], dtype=torch.int64))
    assert inbox.read(one, lambda: bool(done.append("a"))) == [3, -1]
    assert inbox.read(other, lambda: bool(done.append("b"))) == []
    assert done == ["a", "b"]
