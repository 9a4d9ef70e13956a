from __future__ import annotations

import pytest
from torch import nn

from tools.bench.peers.diffusers import children


def test_children_are_hidden_and_come_back_in_their_order() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    whole = list(module.named_children())
    with children(module, {"1": module[2]}):
        assert list(module.named_children()) == [("1", whole[2][1])]
    assert list(module.named_children()) == whole
    with pytest.raises(ZeroDivisionError), children(module, {}):
        raise ZeroDivisionError
    assert list(module.named_children()) == whole
