"""Brings coded buffers to the places where modules read plain weights."""

from __future__ import annotations

from torch import Tensor

from djinnd.model.kernels.coded.decode import decode_on_device
from djinnd.model.kernels.host_memory.fetch import fetch_plain
from djinnd.weights.forms.coded_form import CodedForm


def fetch_coded(picked: Tensor, form: CodedForm, source: Tensor, out: Tensor) -> None:
    """Decodes the picked experts to their places.

    picked: int32 [experts], not 0 for the experts to fetch. source: uint8 [form.nbytes], all experts of a block, on the
    device or in pinned host memory. out: [form.numel], in the dtype of computing.
    """
    for name, code in form.codes.items():
        decode_on_device(code.coding, form.parts(source, name), code.matrices(form.place(out, name)), picked)
    for name, stack in form.plain(source).items():
        fetch_plain(picked, stack, form.place(out, name))
