"""Products: the matrix products of a block, wherever its weights are.

The weights of q, k and v are adjacent in a block's buffer, so they are one matrix without a copy; so are gate and up.
The family's attention still calls three modules. The first call computes all three products, and the others take their
parts of the result.

The modules are replaced once. `Product.bind` gives them their weights, again each time the block moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from djinnd.model.family.experts import stacked_parameters
from djinnd.model.fast.linear import fast_linear
from djinnd.model.tuning import PACKED_ROWS
from djinnd.weights.layout import Layout

# x [rows, in], contiguous, and b [out] or None → x Wᵀ + b [rows, out], for at most PACKED_ROWS rows
FewRows = Callable[[Tensor, Tensor | None], Tensor]


class Product:
    """y = x Wᵀ + b, [..., in] → [..., out], for one unit of a block's layout."""

    def __init__(self, unit: tuple[str, ...], biases: tuple[str, ...]) -> None:
        """unit, biases: names in the layout. `biases` may be empty."""
        self.unit = unit
        self.biases = biases
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.added: Callable[[Tensor, Tensor], None] | None = None  # (x, y): adds to y the products of adapters
        self._few_rows: FewRows | None = None

    def bind(self, weight: Tensor, bias: Tensor | None, few_rows: FewRows | None = None) -> None:
        """Sets the weights. weight: [out, in]. `few_rows` multiplies up to PACKED_ROWS rows by the weights as they are
        stored; `weight` then holds them only when more rows are computed."""
        self.weight, self.bias, self._few_rows = weight, bias, few_rows

    def __call__(self, x: Tensor) -> Tensor:
        y = self._multiply(x)
        if self.added is not None:
            self.added(x, y)
        return y

    def _multiply(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        few_rows = self._few_rows
        if few_rows is not None and x.numel() // x.shape[-1] <= PACKED_ROWS:
            return few_rows(x.reshape(-1, x.shape[-1]).contiguous(), self.bias).view(*x.shape[:-1], -1)
        return fast_linear(x, self.weight, self.bias)


class SharedProduct:
    """A product whose result is divided among several modules. The first module's call computes it, and the last
    module's call drops it."""

    def __init__(self, product: Product, sizes: list[int]) -> None:
        self._product = product
        self._sizes = sizes
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = [None] * len(sizes)

    def part(self, index: int, x: Tensor) -> Tensor:
        part = self._parts[index]
        if x is not self._input or part is None:
            self._input = x
            self._parts = list(self._product(x).split(self._sizes, dim=-1))
            part = self._parts[index]
            assert part is not None
        self._parts[index] = None
        if not any(p is not None for p in self._parts):
            self._input = None
        return part


@dataclass(frozen=True, slots=True)
class Described:
    """Shape, dtype and device of a parameter, which some forwards read. It is not a tensor, so a forward that computes
    with it, instead of calling the product, fails."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Projection(nn.Module):
    """Replaces a Linear: [..., in] → [..., out]. Has the attributes that forwards read, and no parameters."""

    def __init__(self, linear: nn.Linear, product: Product, compute: Callable[[Tensor], Tensor]) -> None:
        """product: has the Linear's weights, and maybe those of other Linears. compute: gives this Linear's result."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.product = product
        self._has_bias = linear.bias is not None
        self._compute = compute

    @property
    def has_own_product(self) -> bool:
        """True if the product belongs to this Linear alone. Its weights are then this Linear's."""
        return len(self.product.unit) == 1

    @property
    def weight(self) -> Described:
        return self._described(self.out_features, self.in_features)

    @property
    def bias(self) -> Described | None:
        return self._described(self.out_features) if self._has_bias else None

    def _described(self, *shape: int) -> Described:
        weight = self.product.weight
        assert weight is not None
        return Described(torch.Size(shape), weight.dtype, weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(x)


# Linear layers that choose experts: small, and an error in them changes which weights are used.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


def quantisable(block: nn.Module, layout: Layout) -> list[str]:
    """The parameters of a layout that may be quantised: weights of Linear layers but routers, and stacks of experts."""
    found = []
    for name in (name for unit in layout.units for name in unit):
        path, _, leaf = name.rpartition(".")
        module = block.get_submodule(path)
        is_linear = type(module) is nn.Linear and leaf == "weight" and path.rpartition(".")[2] not in ROUTERS
        if is_linear or leaf in stacked_parameters(module):
            found.append(name)
    return found


def install_products(block: nn.Module, layout: Layout) -> list[Product]:
    """Replaces the plain Linear modules of `block` by products over the layout's units. Other modules keep their
    parameters."""
    products = []
    for unit in layout.units:
        if not all(name.endswith(".weight") for name in unit):
            continue
        paths = [name.removesuffix(".weight") for name in unit]
        members = [member for path in paths if type(member := block.get_submodule(path)) is nn.Linear]
        if len(members) < len(paths):
            continue
        biases = tuple(f"{path}.bias" for path in paths)
        has_bias = [member.bias is not None for member in members]
        if any(has_bias) and not (len(unit) == 1 or (all(has_bias) and biases in layout.runs)):
            continue
        product = Product(unit, biases if any(has_bias) else ())
        products.append(product)
        if len(unit) == 1:
            _put(block, paths[0], Projection(members[0], product, product))
            continue
        shared = SharedProduct(product, [member.out_features for member in members])
        for index, (path, member) in enumerate(zip(paths, members, strict=True)):
            _put(block, path, Projection(member, product, partial(shared.part, index)))
    return products


def _put(block: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(block.get_submodule(parent), leaf, module)
