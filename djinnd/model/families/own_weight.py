"""Linear modules with weights that the family's forward reads itself, instead of calling the module. They keep their
weights, where other linear modules become products (placing/projections.py)."""

from __future__ import annotations

from torch import nn

FAMILIES = {"longcat_flash": "mlp.router.classifier"}  # path within each block


class OwnWeight(nn.Linear):
    """Not `nn.Linear` itself, so it is not replaced."""


def keep(blocks: nn.ModuleList, path: str) -> None:
    for block in blocks:
        linear = block.get_submodule(path)
        assert type(linear) is nn.Linear
        linear.__class__ = OwnWeight
