"""Captured activations without torch. Imported when there are some, for it needs numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Activation(np.ndarray):
    """An array that knows what torch tensors of a Cache know: its `point`, and the `first` position in it. Arrays made
    from it do not, but for `stored`, the dtype on the wire, which numpy may have no name for: bfloat16 is uint16."""

    point: str
    first: int
    stored: str

    def __array_finalize__(self, source: npt.NDArray[Any] | None) -> None:
        self.stored = getattr(source, "stored", "")
