"""The arithmetic of embeddings. It needs numpy, and is imported with the first embedding: the server starts without."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from djinn_client.protocol.fields.edits import Captured

Pooling = Literal["mean", "last"]
Vector = npt.NDArray[np.float32]


def pooled(fds: Sequence[int], captured: Captured, pooling: Pooling) -> Vector:
    """Pools the rows in this window, and closes it."""
    (fd,), (point,) = fds, captured.points
    try:
        with mmap.mmap(fd, captured.nbytes, prot=mmap.PROT_READ) as window:
            bits = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[captured.dtype]
            shape = captured.positions, point.width
            rows = np.ndarray(shape, bits, window, point.offset)
            return _as_float32(rows[-1] if pooling == "last" else rows, captured.dtype, pooling)
    finally:
        os.close(fd)


def joined(vectors: Sequence[Vector], normalize: bool) -> tuple[bytes, int]:
    """All of them as float32 bytes, and their width. `normalize`: each to length 1."""
    rows = np.stack(vectors)
    if normalize:
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return rows.tobytes(), rows.shape[1]


def _as_float32(rows: npt.NDArray[np.generic], dtype: str, pooling: Pooling) -> Vector:
    """A copy: the last row, or the mean of all."""
    exact = (rows.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else rows.astype(np.float32)
    return exact.mean(axis=0, dtype=np.float64).astype(np.float32) if pooling == "mean" else exact
