"""The arithmetic of embeddings. It needs numpy, and the rest of the server does not. So the first embedding imports it,
in its thread, which takes a tenth of a second."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from djinn_client.protocol.fields.edits import Captured

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Pooling = Literal["mean", "last"]
Vector: TypeAlias = "npt.NDArray[np.float32]"


def pooled(fds: Sequence[int], captured: Captured, pooling: Pooling) -> Vector:
    """The last row in this window, or the mean of its rows. Closes the window."""
    import numpy as np

    (fd,), (point,) = fds, captured.points
    try:
        with mmap.mmap(fd, captured.nbytes, prot=mmap.PROT_READ) as window:
            bits = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[captured.dtype]
            rows = np.ndarray((captured.positions, point.width), bits, window, point.offset)
            rows = rows[-1:] if pooling == "last" else rows
            exact = (rows.astype(np.uint32) << 16).view(np.float32) if bits is np.uint16 else rows.astype(np.float32)
            vector: Vector = exact.mean(axis=0, dtype=np.float64).astype(np.float32)
            return vector
    finally:
        os.close(fd)


def joined(vectors: Sequence[Vector], normalize: bool) -> tuple[bytes, int]:
    """All of them as float32 bytes, and their width. `normalize`: each to length 1."""
    import numpy as np

    rows = np.stack(vectors)
    if normalize:
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return rows.tobytes(), rows.shape[1]
