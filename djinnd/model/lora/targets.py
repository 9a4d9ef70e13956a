"""Targets: the linear modules of a model's blocks. Adapters may add to their results.

A product computes q, k and v at once, or gate and up (placing/projections.py), so it is one target with several parts.
A linear module that is no product is a target with one part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from djinnd.model.fast.linear import FastLinear
from djinnd.model.placing.projections import Product, Projection

Add = Callable[[Tensor, Tensor], None]  # (x [..., in], y [..., out]): adds to y in place


@dataclass(frozen=True, slots=True)
class Target:
    """A place for adapters."""

    module: Product | nn.Module
    inputs: int
    prefix: str  # of the block's names, such as "model.layers.0."
    names: tuple[str, ...]  # within the block: modules; their joined results are this module's result
    sizes: tuple[int, ...]  # outputs of each part; their sum is the width of the result

    @property
    def paths(self) -> tuple[str, ...]:
        """The full names of the parts' modules."""
        return tuple(self.prefix + name for name in self.names)

    def add(self, act: Add) -> Callable[[], None]:
        """Calls `act` with each input and result of the module from now on, until the returned function is called."""
        module = self.module
        if isinstance(module, Product):
            module.added = act
            return lambda: setattr(module, "added", None)
        return module.register_forward_hook(lambda _, given, result: act(given[0], result)).remove


def find_targets(blocks: Sequence[nn.Module], prefixes: Sequence[str], left_out: Collection[str] = ()) -> list[Target]:
    """The targets of a model, in the order of its blocks. prefixes: of the blocks' names, "model.layers.0." and so on.

    Modules in a list within a block are left out: these are experts, which get other rows than the step's tokens. So
    are the modules that expand latents, whose names are in `left_out`. A rehearsal finds other modules that get other
    rows (step/adapter_rehearsal.py).
    """
    found = [target for block, prefix in zip(blocks, prefixes, strict=True) for target in _of_block(block, prefix)]
    return [target for target in found if not any(path in left_out for path in target.paths)]


def _of_block(block: nn.Module, prefix: str) -> Iterator[Target]:
    lists = tuple(f"{name}." for name, module in block.named_modules() if isinstance(module, nn.ModuleList))
    parts: dict[Product, list[tuple[str, Projection]]] = {}
    for name, module in block.named_modules():
        if name.startswith(lists):
            continue
        if isinstance(module, Projection):
            parts.setdefault(module.product, []).append((name, module))
        elif (shape := _linear_shape(module)) is not None:
            yield Target(module, shape[0], prefix, (name,), (shape[1],))
    for product, found in parts.items():
        order = [name.removesuffix(".weight") for name in product.unit]
        found.sort(key=lambda each: order.index(each[0]))
        names, modules = zip(*found, strict=True)
        sizes = tuple(module.out_features for module in modules)
        yield Target(product, modules[0].in_features, prefix, names, sizes)


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear module; None for others."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if isinstance(module, FastLinear):
        return module.weight.shape[1], module.weight.shape[0]
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return None
