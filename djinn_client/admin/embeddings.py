"""Vectors of texts, as `embed` returns them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from djinn_client.protocol import Embedded
from djinn_client.tensors.arrays import expect_arrays

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Embeddings:
    """A vector of `width` numbers for each input, in the order of the inputs. `tokens` has the number of tokens of each
    input, `pooling` says how its rows became one vector.

    `numpy.asarray(embeddings)` is float32 [inputs, width]. Without numpy, `embeddings[0]` is the first vector as a list
    of numbers."""

    def __init__(self, reply: Embedded) -> None:
        self.width = reply.width
        self.tokens = reply.tokens
        self.pooling = reply.pooling
        self._values = array("f", reply.vectors)
        if sys.byteorder == "big":
            self._values.byteswap()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> list[float]:
        at = range(len(self))[index] * self.width
        return self._values[at : at + self.width].tolist()

    def __iter__(self) -> Iterator[list[float]]:
        return (self[index] for index in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.float32]:
        """For `numpy.asarray`."""
        expect_arrays("an array of vectors")
        import numpy as np

        rows = np.frombuffer(self._values, np.float32).reshape(len(self), self.width)
        return np.array(rows, dtype=dtype) if copy else rows.astype(dtype or np.float32, copy=False)
