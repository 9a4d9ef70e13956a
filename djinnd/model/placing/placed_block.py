"""PlacedBlock: one block on the device, with its modules and the memory that they compute from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from djinn_client.handover.packed import PackedForm
from djinnd.model.attention.latents import Latents
from djinnd.model.family.experts import Experts
from djinnd.model.family.skeleton import bind
from djinnd.model.placing.projections import FewRows, Product
from djinnd.model.placing.stored_form import (
    decode_for_step,
    decode_units,
    few_rows,
    in_place,
    stored_experts,
    units_beside,
    weight_of,
)
from djinnd.model.tuning import PACKED_ROWS
from djinnd.weights.forms.coded_form import CodedForm
from djinnd.weights.layout import Layout
from djinnd.weights.plan import BlockPlace, aligned
from djinnd.weights.store import BufferForm

if TYPE_CHECKING:  # Triton comes with CUDA builds of torch
    from djinnd.model.fast.experts import FusedExperts


@dataclass(slots=True)
class PlacedBlock:
    """A block, its place and its memory. WeightPlacement allocates the memory and sets `place`, `memory` and
    `packed`."""

    module: nn.Module
    layout: Layout  # without stacked experts
    form: BufferForm | None  # without stacked experts; None: the block is stored plain
    products: list[Product]
    experts: Experts | None
    fused: FusedExperts | None = None  # on a GPU, if the kernels compute what the experts' module does
    place: BlockPlace | None = None
    memory: Tensor | None = None  # resident: flat in the compute dtype, or uint8 in its form; then stacked experts
    packed: Tensor | None = None  # the stored form while the block computes: resident or in the ring
    few_rows_as_packed: bool = False  # products of few rows read the stored form directly
    units_beside: Sequence[int] = ()  # packed units that those products do not read

    def prepare(self, rows: int, scratch: Tensor | None, missing: Sequence[tuple[str, ...]] = ()) -> None:
        """Decodes the block to `scratch`, except for what a batch of `rows` tokens reads in the stored form. Queues
        only kernels over fixed addresses. missing: units that have not come with the block."""
        if self.packed is None:
            return
        assert self.form is not None and scratch is not None
        out = scratch[: self.layout.numel]
        if not (self.few_rows_as_packed and rows <= PACKED_ROWS):
            decode_for_step(self.form, self.layout, self.packed, out, missing)
        elif self.units_beside:
            assert isinstance(self.form, PackedForm)
            decode_units(self.form, self.units_beside, self.packed, out)

    def bind(self, scratch: Tensor | None, experts: Tensor | None, *, decodes_experts: bool = True) -> None:
        """Binds the modules to views of the memory. Copies nothing.

        experts: for a plain block, its stacked experts, flat; otherwise the memory to fetch them from.
        decodes_experts: False lets kernels multiply by the codes of the experts for any number of rows.
        """
        layout, packed, form = self.layout, self.packed, self.form
        if packed is None:
            assert self.memory is not None
            plain = self.memory[: layout.numel]
            views = layout.views(plain)
        else:
            assert form is not None and scratch is not None
            plain = scratch[: layout.numel]
            views = layout.views(plain) | in_place(form, layout, packed)
        if self.experts is not None:
            assert experts is not None
            if decodes_experts:
                views |= self.experts.layout.views(self._bind_experts(self.experts, experts, scratch))
            else:
                views |= self._bind_codes(self.experts, experts, scratch)
        few: dict[int, FewRows] = {}
        if form is not None and packed is not None and self.place is BlockPlace.PACKED and not self._has_latents():
            few = few_rows(form, layout, self.products, packed)
        self.few_rows_as_packed = bool(few)
        if form is not None:
            self.units_beside = units_beside(form, layout, [self.products[index].unit for index in few])
        for index, product in enumerate(self.products):
            weight = layout.joined(plain, product.unit)
            if form is not None and packed is not None:
                weight = weight_of(form, layout, product.unit, packed, plain)
            product.bind(weight, _joined_bias(views, product.biases), few.get(index))
        bind(self.module, {name: view for name, view in views.items() if name not in self._of_products})

    def _bind_experts(self, experts: Experts, source: Tensor, scratch: Tensor | None) -> Tensor:
        """→ the flat memory in which the block's module finds its experts. For experts on demand it is part of
        scratch, and valid for the fetched ones only."""
        if self.place is BlockPlace.PLAIN:
            if self.fused is not None:
                self.fused.bind(None, None)
            return source
        assert scratch is not None
        start = 0 if self.packed is None else self.layout.numel
        fetched = scratch[start : start + experts.layout.numel]
        experts.bind(source, fetched, by_hook=self.fused is None)
        if self.fused is not None:
            # Over the bus, codes would pass once for each tile of rows.
            is_resident = self.place is BlockPlace.PACKED
            stored = stored_experts(experts.form, source, self.fused.kind.is_transposed) if is_resident else None
            self.fused.bind(stored, experts.fetch_for_step)
        return fetched

    def _bind_codes(self, experts: Experts, source: Tensor, scratch: Tensor | None) -> dict[str, Tensor]:
        """Lets the kernels multiply by the codes for any number of rows. Codes of a streamed block are fetched to
        scratch. Returns the module's parameters. Parameters with a code have no memory."""
        fused, form, there = self.fused, experts.form, source
        assert fused is not None and isinstance(form, CodedForm)
        is_streamed = self.place is BlockPlace.STREAMED
        if is_streamed:
            assert scratch is not None
            start = 0 if self.packed is None else aligned(self.layout.numel * scratch.itemsize)
            there = scratch.view(torch.uint8)[start : start + form.nbytes]
            experts.bind(source, there, by_hook=False)
        stored = stored_experts(form, there, fused.kind.is_transposed)
        assert stored is not None, "the plan decodes experts that kernels cannot multiply by"
        fused.bind(stored, experts.fetch_for_step if is_streamed else None, partial(_decoded, form, there))
        nothing = experts.layout.views(torch.empty(experts.layout.numel, dtype=form.dtype, device="meta"))
        return nothing | form.plain(there)

    def _has_latents(self) -> bool:
        """True if a matrix of the block expands latents: it multiplies those of whole sessions, or attention reads
        it."""
        return any(isinstance(getattr(module, "expand_kv", None), Latents) for module in self.module.modules())

    def unbind(self) -> None:
        """Drops all references to the memory. The block must not run until it is bound again."""
        nothing = torch.empty(0, device="meta")
        for product in self.products:
            product.bind(nothing, None)
        names = self.layout.entries.keys() - self._of_products
        if self.experts is not None:
            self.experts.unbind()
            if self.fused is not None:
                self.fused.bind(None, None)
            names |= self.experts.layout.entries.keys()
        bind(self.module, dict.fromkeys(names, nothing))

    @property
    def _of_products(self) -> set[str]:
        """Names of the parameters that products own; the others are bound to their modules."""
        return {name for product in self.products for name in (*product.unit, *product.biases)}


def _decoded(form: CodedForm, stored: Tensor, name: str, expert: int) -> Tensor:
    """One expert's matrix, as the parameter that ends in `name` has it."""
    full = next(entry for entry in form.layout.entries if entry.rpartition(".")[2] == name)
    out = torch.empty(form.layout.entries[full].shape[1:], dtype=form.dtype, device=stored.device)
    form.unpack_expert(stored, full, expert, out)
    return out


def _joined_bias(views: dict[str, Tensor], biases: tuple[str, ...]) -> Tensor | None:
    """The biases of a product as one view. They are adjacent in the buffer. None if it has none."""
    if not biases:
        return None
    first = views[biases[0]]
    return first.as_strided((sum(views[name].numel() for name in biases),), (1,))
