"""PlacedBlock: one block on the device, with its modules and the memory that they compute from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from djinn_client.handover.packed import PackedForm
from djinnd.model.family.experts import Experts
from djinnd.model.family.skeleton import bind
from djinnd.model.placing.projections import PackedWeight, Product
from djinnd.model.tuning import PACKED_ROWS
from djinnd.weights.layout import Layout
from djinnd.weights.plan import BlockPlace


@dataclass(slots=True)
class PlacedBlock:
    """A block, its place and its memory. WeightPlacement allocates the memory and sets `place`, `memory` and
    `packed`."""

    module: nn.Module
    layout: Layout  # without stacked experts
    form: PackedForm | None  # without stacked experts; None: the block has no packed form
    products: list[Product]
    experts: Experts | None
    place: BlockPlace | None = None
    memory: Tensor | None = None  # resident: flat in the compute dtype, or packed uint8; stacked experts at the end
    packed: Tensor | None = None  # the packed form while the block computes: resident or in the ring
    few_rows_as_packed: bool = False  # products of few rows read the packed form directly

    def prepare(self, rows: int, scratch: Tensor | None) -> None:
        """Unpacks the block to `scratch`, unless a batch of `rows` tokens reads the packed form directly. Queues only
        kernels over fixed addresses."""
        if self.packed is None or (self.few_rows_as_packed and rows <= PACKED_ROWS):
            return
        assert self.form is not None and scratch is not None
        unpack(self.form, self.packed, scratch[: self.layout.numel])

    def bind(self, scratch: Tensor | None, experts: Tensor | None) -> None:
        """Binds the modules to views of the memory. Copies nothing.

        experts: for a plain block, its stacked experts, flat; otherwise the memory to fetch them from.
        """
        layout, packed = self.layout, self.packed
        if packed is None:
            assert self.memory is not None
            plain = self.memory[: layout.numel]
            views = layout.views(plain)
        else:
            assert self.form is not None and scratch is not None
            plain = scratch[: layout.numel]
            views = layout.views(plain) | layout.vectors(self.form.vectors_view(packed))
        if self.experts is not None:
            assert experts is not None
            views |= self.experts.layout.views(self._bind_experts(self.experts, experts, scratch))
        self.few_rows_as_packed = self._products_suffice()
        for product in self.products:
            own = None
            if self.few_rows_as_packed:
                assert self.form is not None and packed is not None
                own = PackedWeight(self.form, layout.units.index(product.unit), packed)
            product.bind(layout.joined(plain, product.unit), _joined_bias(views, product.biases), own)
        bind(self.module, {name: view for name, view in views.items() if name not in self._of_products})

    def _bind_experts(self, experts: Experts, source: Tensor, scratch: Tensor | None) -> Tensor:
        """→ the flat memory in which the block's module finds its experts. For experts on demand it is part of
        scratch, and valid for the fetched ones only."""
        if self.place is BlockPlace.PLAIN:
            return source
        assert scratch is not None
        start = 0 if self.packed is None else self.layout.numel
        fetched = scratch[start : start + experts.layout.numel]
        experts.bind(source, fetched)
        return fetched

    def _products_suffice(self) -> bool:
        """Returns True if products of few rows can read every matrix of the block in packed form."""
        if self.place is not BlockPlace.PACKED or self.packed is None or not self.packed.is_cuda:
            return False
        from djinnd.model.kernels.packed_product import product_fits  # Triton comes with CUDA builds of torch

        assert self.form is not None
        return len(self.products) == len(self.layout.units) and all(map(product_fits, self.form.units))

    def unbind(self) -> None:
        """Drops all references to the memory. The block must not run until it is bound again."""
        nothing = torch.empty(0, device="meta")
        for product in self.products:
            product.bind(nothing, None)
        names = self.layout.entries.keys() - self._of_products
        if self.experts is not None:
            self.experts.unbind()
            names |= self.experts.layout.entries.keys()
        bind(self.module, dict.fromkeys(names, nothing))

    @property
    def _of_products(self) -> set[str]:
        """Names of the parameters that products own; the others are bound to their modules."""
        return {name for product in self.products for name in (*product.unit, *product.biases)}


def unpack(form: PackedForm, packed: Tensor, out: Tensor) -> None:
    """Unpacks to `out`, in bfloat16: by the kernel on CUDA, by the form's reference code on the CPU."""
    if out.is_cuda:
        from djinnd.model.kernels.unpack import unpack as unpack_by_kernel  # Triton comes with CUDA builds of torch

        unpack_by_kernel(form, packed, out)
    else:
        form.unpack(packed, out)


def _joined_bias(views: dict[str, Tensor], biases: tuple[str, ...]) -> Tensor | None:
    """The biases of a product as one view. They are adjacent in the buffer. None if it has none."""
    if not biases:
        return None
    first = views[biases[0]]
    return first.as_strided((sum(views[name].numel() for name in biases),), (1,))
