"""WeightStore: a model's buffers in host memory, in the form in which they are copied to the device.

The host copy of a model is one range of shared memory, buffer after buffer:

    │ block 0 │ … │ block L-1 │ experts of blocks … │ rest: embedding, final norm, head │     each starts on a host page

A block with stacked experts has two buffers, because its trunk streams without the experts: the trunk has the block's
place, and the experts come after all blocks. A buffer with matrices that the checkpoint stores in fewer bits keeps
their codes. The other buffers are all packed, or all plain; the rest is always plain. The store does not fill itself:
`weights/filling.py` does, or a client that shares a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from djinn_client.handover.packed import PackedForm, Unit
from djinnd.weights.forms.coded_form import Coded, CodedForm
from djinnd.weights.layout import Layout
from djinnd.weights.plan import BlockSize, ExpertsSize

Recipe = Callable[[Tensor], None]  # fills a parameter's contiguous view; any thread may call it

BufferForm = PackedForm | CodedForm

PAGE = 4096  # bytes; buffers start on pages because they are pinned one by one, and a page can be pinned only once


@dataclass(frozen=True, slots=True)
class Routing:
    """How many stacked experts a block has, and how many of them a row picks."""

    count: int
    picked: int  # fewer than `count`


@dataclass(frozen=True, slots=True)
class Buffer:
    """The buffer of one block, of a block's experts, or of the rest."""

    name: str  # prefix of its parameters' names: "model.layers.3.", or "" for the rest
    layout: Layout
    recipes: dict[str, Recipe]  # parameter without a code → function that fills it; empty if a client fills the store
    routing: Routing | None = None  # set for a buffer of experts
    coded: dict[str, Coded] = field(default_factory=dict)  # parameters that are kept in the checkpoint's code
    codes_suffice: bool = False  # experts only: see ExpertsSize

    @property
    def packed_units(self) -> list[tuple[str, ...]]:
        """The matrices that are packed, the first ones of the layout. Of experts all are, since each is fetched by the
        number of its unit."""
        return self.layout.large if self.routing is None else self.layout.units

    def packed_form(self) -> PackedForm:
        """Raises Unpackable if a packed form cannot have so many weights."""
        places = ((self.layout.entries[unit[0]].offset, *self.layout.unit_shape(unit)) for unit in self.packed_units)
        return PackedForm([Unit(*place) for place in places], self.layout.numel)


class WeightStore:
    """The buffers of one model over one range of host memory: uint8 [nbytes], shared and page-aligned."""

    def __init__(
        self, buffers: Sequence[Buffer], dtype: torch.dtype, *, packed: bool, keeps_codes: bool = False
    ) -> None:
        """buffers: first the blocks, then experts of blocks, which have the name of their block, then the rest.
        dtype: of the weights in the store that have no code; `packed` requires bfloat16.
        keeps_codes: blocks with codes are never decoded for good, even where the memory would suffice."""
        assert not packed or dtype is torch.bfloat16
        self.buffers = list(buffers)
        self.num_blocks = sum(buffer.routing is None for buffer in self.buffers) - 1
        blocks = {buffer.name: index for index, buffer in enumerate(self.buffers[: self.num_blocks])}
        experts = range(self.num_blocks, len(self.buffers) - 1)
        self.experts = {blocks[self.buffers[index].name]: index for index in experts}  # block → buffer of its experts
        self.dtype = dtype
        self.forms = self._forms(packed)
        self._keeps_codes = keeps_codes
        self._sizes = [
            buffer.layout.nbytes(dtype) if form is None else form.nbytes
            for buffer, form in zip(self.buffers, self.forms, strict=True)
        ]
        self.extents = [-(-size // PAGE) * PAGE for size in self._sizes]  # bytes of each buffer, in whole pages
        self.offsets = [0, *accumulate(self.extents)][:-1]
        self.nbytes = sum(self.extents)
        self._memory: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """True if any buffer is packed."""
        return any(isinstance(form, PackedForm) for form in self.forms)

    @property
    def codes(self) -> list[str]:
        """Names of the checkpoint's codes that the buffers keep."""
        return list(dict.fromkeys(name for form in self.forms if isinstance(form, CodedForm) for name in form.names))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all weights in their codes, or in the store's dtype if they have none."""
        coded = [form.nbytes if isinstance(form, CodedForm) else None for form in self.forms]
        plain = [buffer.layout.nbytes(self.dtype) for buffer in self.buffers]
        return sum(own if code is None else code for own, code in zip(plain, coded, strict=True))

    def sizes(self, dtype: torch.dtype) -> list[BlockSize]:
        """Sizes of the blocks on a device that computes in `dtype`."""
        return [self._size(index, dtype) for index in range(self.num_blocks)]

    def _size(self, block: int, dtype: torch.dtype) -> BlockSize:
        own = self.parts(block)
        plain = [self.buffers[index].layout.nbytes(dtype) for index in own]
        packed = [form.nbytes for form in (self.forms[index] for index in own) if form is not None]
        experts, last = None, self.buffers[own[-1]]
        if (routing := last.routing) is not None:
            stored = packed[-1] if packed else None
            experts = ExpertsSize(plain[-1], stored, routing.count, routing.picked, last.codes_suffice)
        keeps_form = self._keeps_codes and any(isinstance(self.forms[index], CodedForm) for index in own)
        return BlockSize(sum(plain), sum(packed) if packed else None, experts, keeps_form)

    def parts(self, block: int) -> list[int]:
        """Indices of a block's buffers: its own, and that of its stacked experts if it has them."""
        return [block, self.experts[block]] if block in self.experts else [block]

    def _forms(self, packed: bool) -> list[BufferForm | None]:
        """The form of each buffer; None for a plain one and for the rest. Equal packed buffers share one form. The
        buffers of one block have forms, or none has."""
        known: dict[PackedForm, PackedForm] = {}
        forms: list[BufferForm | None] = [None] * len(self.buffers)
        for block in range(self.num_blocks):
            own = self.parts(block)
            is_coded = any(self.buffers[index].coded for index in own)
            for index in own:
                layout, coded = self.buffers[index].layout, self.buffers[index].coded
                if coded or (is_coded and not packed):
                    forms[index] = CodedForm(layout, {name: each.code for name, each in coded.items()}, self.dtype)
                elif packed:
                    form = self.buffers[index].packed_form()
                    forms[index] = known.setdefault(form, form)
        return forms

    def attach(self, memory: Tensor) -> None:
        assert memory.dtype == torch.uint8 and memory.numel() == self.nbytes, (memory.shape, self.nbytes)
        self._memory = memory

    def detach(self) -> None:
        """Drops the host memory, when the model does not need it any more."""
        self._memory = None

    @property
    def is_attached(self) -> bool:
        return self._memory is not None

    def host(self, index: int) -> Tensor:
        """A buffer's host memory: uint8 if it has a form, otherwise flat [numel] in the store's dtype."""
        assert self._memory is not None
        start = self.offsets[index]
        stored = self._memory[start : start + self._sizes[index]]
        return stored if self.forms[index] is not None else stored.view(self.dtype)

    def travelling(self, index: int) -> Tensor:
        """The part of `host` that is copied to the device. For a packed buffer it ends after the patches in use.

        Raises ValueError if the bytes are not a packed form of this buffer.
        """
        form, stored = self.forms[index], self.host(index)
        return stored if form is None else stored[: form.used(stored)]

    def not_finite(self) -> str | None:
        """Name of the first parameter, in the store's order, that holds NaN or infinity; None if there is none. Reads
        the whole store."""
        for index, (buffer, form) in enumerate(zip(self.buffers, self.forms, strict=True)):
            plain = self.host(index)
            if form is not None:
                packed, plain = plain, torch.empty(form.numel, dtype=torch.bfloat16)
                form.unpack(packed[: form.nbytes], plain)
            for name, view in buffer.layout.views(plain).items():
                if not bool(view.isfinite().all()):
                    return buffer.name + name
        return None

    def pieces(self) -> list[Tensor]:
        """The host memory of each buffer, uint8, in whole pages; empty if the store has no memory."""
        return [] if self._memory is None else list(self._memory.split(self.extents))
