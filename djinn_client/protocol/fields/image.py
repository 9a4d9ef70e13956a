"""The image of a model: where a client that shares one puts its weights, so that the daemon computes with them as they
lie there. The engine describes it, because only it knows the layout; the client fills it.

    │ block 0 │ block 1 │ … │ block L-1 │ rest: embedding, final norm, head │     each starts on a page of the host
"""

from __future__ import annotations

from typing import Literal

import msgspec

Dtype = Literal["float32", "bfloat16", "float16"]


class ImageTensor(msgspec.Struct, frozen=True, array_like=True):
    """`offset` counts elements of the buffer's plain form. The further `names` are tied to the first."""

    names: list[str]
    shape: list[int]
    offset: int


class ImageUnit(msgspec.Struct, frozen=True, array_like=True):
    """A matrix of a packed buffer: see djinn_client.handover.packed.Unit."""

    offset: int
    rows: int
    cols: int


class ImageBuffer(msgspec.Struct, frozen=True, array_like=True):
    """Plain: `numel` elements, row-major, in the image's dtype. With `units`: the packed form of such a buffer."""

    offset: int  # bytes
    extent: int  # bytes, whole pages
    numel: int
    tensors: list[ImageTensor]
    units: list[ImageUnit] = []


class Image(msgspec.Struct, frozen=True):
    """`unused`: patterns of names that a state dict may have and the model does without, as transformers has them."""

    dtype: Dtype
    nbytes: int
    buffers: list[ImageBuffer]
    unused: list[str] = []
    notes: list[str] = []  # why blocks stay plain, and such
