"""One block on the device: its modules, and the memory that they compute from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from djinn_client.packed import PackedForm
from djinnd.model.experts import Experts
from djinnd.model.projections import PACKED_ROWS, PackedWeight, Product
from djinnd.model.skeleton import bind
from djinnd.weights.layout import Layout
from djinnd.weights.plan import Place


@dataclass(slots=True)
class PlacedBlock:
    """`memory` is what is resident of it: flat in the compute dtype, or packed, with its experts behind it. `packed` is
    where its packed form is when it computes: resident or in the ring. `layout` and `form` are without the experts."""

    module: nn.Module
    layout: Layout
    form: PackedForm | None
    products: list[Product]
    experts: Experts | None
    place: Place | None = None
    memory: Tensor | None = None
    packed: Tensor | None = None
    few_rows_as_packed: bool = False

    def prepare(self, rows: int, scratch: Tensor | None) -> None:
        """Decodes what so many rows will need of it in plain form. Queues kernels over fixed addresses, no more."""
        if self.packed is None or (self.few_rows_as_packed and rows <= PACKED_ROWS):
            return
        assert self.form is not None and scratch is not None
        unpack(self.form, self.packed, scratch[: self.layout.numel])

    def bind(self, scratch: Tensor | None, experts: Tensor | None) -> None:
        """Gives the modules their tensors: views, never copies. `experts`: theirs, flat where they are plain on the
        device, else where those that are picked are fetched from."""
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
        """→ where the block's module finds its experts, flat; of those that are fetched on demand, the picked ones."""
        if self.place is Place.PLAIN:
            return source
        assert scratch is not None
        start = 0 if self.packed is None else self.layout.numel
        fetched = scratch[start : start + experts.layout.numel]
        experts.bind(source, fetched)
        return fetched

    def _products_suffice(self) -> bool:
        """Whether a pass of few rows needs none of the block's matrices in plain form."""
        if self.place is not Place.PACKED or self.packed is None or not self.packed.is_cuda:
            return False
        from djinnd.model.kernels import product_fits  # needs Triton, which comes with CUDA builds of torch

        assert self.form is not None
        return len(self.products) == len(self.layout.units) and all(map(product_fits, self.form.units))

    def unbind(self) -> None:
        """Lets go of the memory: nothing may run the block until it is bound again."""
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
        return {name for product in self.products for name in (*product.unit, *product.biases)}


def unpack(form: PackedForm, packed: Tensor, out: Tensor) -> None:
    """By the kernel on CUDA, else by the form's own reference."""
    if out.is_cuda:
        from djinnd.model import kernels  # needs Triton, which comes with CUDA builds of torch

        kernels.unpack(form, packed, out)
    else:
        form.unpack(packed, out)


def _joined_bias(views: dict[str, Tensor], biases: tuple[str, ...]) -> Tensor | None:
    """The biases of a product as one: they lie side by side."""
    if not biases:
        return None
    first = views[biases[0]]
    return first.as_strided((sum(views[name].numel() for name in biases),), (1,))
