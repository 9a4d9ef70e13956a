"""One matrix product for projections that share their input.

q, k and v (and gate and up) lie side by side in a block's buffer, so their weights are one matrix without a copy. The
family's attention still calls three modules; the first call computes all three products, the others take their part.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from djinnd.weights.layout import Layout


class SharedProduct:
    """y = x Wᵀ + b for the members' rows of W at once. Holds the result only between the first member's call and the
    last one's."""

    def __init__(self, sizes: list[int], weight: Tensor, bias: Tensor | None) -> None:
        self._sizes = sizes
        self._weight = weight
        self._bias = bias
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = [None] * len(sizes)

    def part(self, index: int, x: Tensor) -> Tensor:
        part = self._parts[index]
        if x is not self._input or part is None:
            self._input = x
            self._parts = list(linear(x, self._weight, self._bias).split(self._sizes, dim=-1))
            part = self._parts[index]
            assert part is not None
        self._parts[index] = None
        if not any(p is not None for p in self._parts):
            self._input = None
        return part


class SharedLinear(nn.Module):
    """Stands where one of the projections stood: [..., in] → [..., out of this member], a view of the shared result."""

    def __init__(self, product: SharedProduct, index: int) -> None:
        super().__init__()
        self.product = product
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(self.index, x)


def fuse(block: nn.Module, layout: Layout, buffer: Tensor) -> None:
    """Replaces, in a block that is bound to `buffer`, each group of plain Linear modules that the layout has joined."""
    for run in layout.runs:
        if not all(name.endswith(".weight") for name in run):
            continue
        paths = [name.removesuffix(".weight") for name in run]
        members = [block.get_submodule(path) for path in paths]
        if not all(type(member) is nn.Linear for member in members):
            continue
        biases = tuple(f"{path}.bias" for path in paths)
        has_bias = [member.bias is not None for member in members]
        if any(has_bias) and biases not in layout.runs:
            continue
        bias = layout.joined(buffer, biases) if all(has_bias) else None
        sizes = [layout.entries[name].shape[0] for name in run]
        product = SharedProduct(sizes, layout.joined(buffer, run), bias)
        for index, path in enumerate(paths):
            parent, _, leaf = path.rpartition(".")
            setattr(block.get_submodule(parent), leaf, SharedLinear(product, index))
