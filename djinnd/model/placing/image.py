"""Describes the image of a model, which a client fills to share its weights: the layout of the WeightStore, as protocol
structs."""

from __future__ import annotations

from typing import cast

from djinn_client.protocol.fields.image import Dtype, Image, ImageBuffer, ImageTensor, ImageUnit
from djinnd.model.placing.loader import ModelLoader
from djinnd.weights.forms.coded_form import CodedForm


def image_of(loader: ModelLoader) -> Image:
    store, tied = loader.store, loader.skeleton.tied
    buffers = []
    for index, buffer in enumerate(store.buffers):
        form = store.forms[index]
        assert not isinstance(form, CodedForm), "a client shares plain or packed weights"
        buffers.append(
            ImageBuffer(
                offset=store.offsets[index],
                extent=store.extents[index],
                numel=buffer.layout.numel,
                tensors=[
                    ImageTensor([name, *tied.get(name, ())], list(entry.shape), entry.offset)
                    for name, entry in ((buffer.name + e.name, e) for e in buffer.layout.entries.values())
                ],
                units=[] if form is None else [ImageUnit(unit.offset, unit.rows, unit.cols) for unit in form.units],
            )
        )
    dtype = cast(Dtype, str(store.dtype).removeprefix("torch."))
    return Image(dtype, store.nbytes, buffers, loader.skeleton.unused, loader.notes)
