from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from djinnd.model.family.learning.own_weights import OwnWeight, _read_outside
from djinnd.model.family.skeleton import Skeleton, build
from tests.families.configurations import reduced


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("called", "described", "multiplied", "cast", "added"):
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x).to(self.described.weight.dtype) / self.described.weight.shape[0]
        x = x @ self.multiplied.weight + functional.linear(x, self.cast.weight.float())
        return self.added(x) - self.added.bias + self.described(x)


def test_only_parameters_that_functions_get_outside_of_their_module_count() -> None:
    with torch.device("meta"):
        block, x = Block(), torch.empty(1, 2, 4)
        assert _read_outside(block, lambda: block(x)) == ["added", "cast", "multiplied"]


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("jamba", [(0, "mamba.dt_proj"), (2, "mamba.dt_proj")]),
        ("longcat_flash", [(0, "mlp.router.classifier"), (1, "mlp.router.classifier")]),
        ("llama", []),
    ],
)
def test_modules_of_families_keep_their_weights(family: str, kept: list[tuple[int, str]]) -> None:
    blocks = Skeleton(build(reduced(family), torch.float32)).adapter.blocks
    own = [(i, path) for i, block in enumerate(blocks) for path, m in block.named_modules() if type(m) is OwnWeight]
    assert own == kept
