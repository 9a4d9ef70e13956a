"""Captured activations without torch. Needs numpy, so it is imported with the first capture."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Activation(np.ndarray):
    """An array with the attributes of a Cache's torch tensors: its `point`, and its `first` position. Arrays made from
    it have only `stored`, the dtype on the wire, because numpy stores bfloat16 as uint16."""

    point: str
    first: int
    stored: str

    def __array_finalize__(self, source: npt.NDArray[Any] | None) -> None:
        self.stored = getattr(source, "stored", "")
