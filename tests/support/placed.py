"""Blocks in places that the test chooses, and the tensors that their modules see."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from djinnd.device.cpu import CpuDevice
from djinnd.model.placing.loader import Weights
from djinnd.model.placing.projections import Product, Projection
from djinnd.weights.plan import BlockPlace, PlacementPlan, scratch_bytes


def plan_of(
    weights: Weights, places: Sequence[BlockPlace], slots: int = 2, *, decodes_experts: bool = True
) -> PlacementPlan:
    """The planner's plan, if it had chosen these places."""
    sizes = weights.store.sizes(weights.dtype)
    travelling = [size.passing for size, place in zip(sizes, places, strict=True) if place is BlockPlace.STREAMED]
    scratch = scratch_bytes(sizes, places, decodes_experts=decodes_experts)
    slots = min(slots, len(travelling))
    ring = min(slots * max(travelling), sum(travelling)) if travelling else 0
    return PlacementPlan(tuple(sizes), tuple(places), ring, scratch, slots, decodes_experts)


class WatchedDevice(CpuDevice):
    """A CPU device that records its allocations without keeping them alive."""

    def __init__(self, memory: int) -> None:
        super().__init__(memory)
        self.allocated: list[tuple[str, weakref.ref[Tensor]]] = []  # labels and their memory, in order

    def allocate(self, label: str, shape: tuple[int, ...], dtype: torch.dtype, *, zero: bool = False) -> Tensor:
        memory = super().allocate(label, shape, dtype, zero=zero)
        self.allocated.append((label, weakref.ref(memory)))
        return memory

    def alive(self) -> list[str]:
        """Labels of the memory that something still references."""
        return sorted(label for label, memory in self.allocated if memory() is not None)


def products_of(block: nn.Module) -> Iterator[tuple[str, Product, slice]]:
    """The Linears that were replaced: name, product that contains it, and its rows of the product."""
    for path, module in block.named_modules():
        if isinstance(module, Projection):
            names = [name.removesuffix(".weight") for name in module.product.unit]
            before = [block.get_submodule(name) for name in names[: names.index(path)]]
            start = sum(int(linear.out_features) for linear in before)
            yield path, module.product, slice(start, start + module.out_features)


def tensors_of(block: nn.Module) -> list[Tensor]:
    """All parameters of the block, and the weights and biases of its products."""
    found: list[Tensor] = list(block.parameters())
    for _, product, _ in products_of(block):
        found += [tensor for tensor in (product.weight, product.bias) if tensor is not None]
    return found


def seen_by(block: nn.Module) -> dict[str, Tensor]:
    """A copy of each tensor of the block as its modules see it now, by its name in the model."""
    seen = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    for path, product, rows in products_of(block):
        assert product.weight is not None
        seen[f"{path}.weight"] = product.weight[rows].clone()
        if product.bias is not None:
            seen[f"{path}.bias"] = product.bias[rows].clone()
    return seen


@functools.cache
def from_files(folder: Path, dtype: torch.dtype, prefixes: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """The parameters of each block, loaded by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    named = dict(model.named_parameters())
    return [
        {n.removeprefix(prefix): p.detach() for n, p in named.items() if n.startswith(prefix)} for prefix in prefixes
    ]


def assert_as_in_the_checkpoint(weights: Weights, folder: Path, passes: int) -> None:
    """Asserts that each block's modules see the bits of the files when the block has been prepared, and until it is
    given back."""
    wanted = from_files(folder, weights.dtype, tuple(weights.skeleton.prefixes))
    for _ in range(passes):
        for index, block in enumerate(weights.skeleton.adapter.blocks):
            weights.placement.begin(index)
            prepare(weights, index)
            weights.placement.check_integrity()
            assert_same(seen_by(block), wanted[index], f"block {index}")
            weights.placement.device.synchronize()
            assert_same(seen_by(block), wanted[index], f"block {index}, when all copies had happened")
            weights.placement.end(index)


def prepare(weights: Weights, index: int) -> None:
    """Prepares a block for a batch that picks every expert."""
    weights.placement.prepare(index, 16)
    experts = weights.placement._blocks[index].experts
    if experts is not None and experts._source is not None:
        experts.fetch(torch.arange(experts.routing.count, device=weights.placement.device.torch_device))


def assert_same(seen: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert seen.keys() == wanted.keys(), seen.keys() ^ wanted.keys()
    for name, tensor in wanted.items():
        assert seen[name].dtype == tensor.dtype and torch.equal(bits(seen[name]), bits(tensor)), f"{what}: {name}"


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)
