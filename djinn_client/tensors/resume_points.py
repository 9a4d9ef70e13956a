"""Activations between two blocks from which a session can resume, unchanged or changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.image import Dtype
from djinn_client.protocol.fields.kv_layout import ITEM_BYTES
from djinn_client.tensors.values import Values, array_of, dtype_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ResumePoint:
    """The activations of some of a session's positions at a point between two blocks.
    `session.resume_from(point)` goes on from there, as often as wanted, on the same session or a fork of it.
    `Cache.resume_point` makes one of captured activations; a Hit is one.

    point        its name
    layer        the block that has run last, counted from 0; None where none has
    positions    the session's positions, a range
    activation   their values there, [1, positions, width] in the model's dtype: a torch tensor, or without torch a
                 numpy array (bfloat16 then as uint16). It is this process's own: `resume` sees what was written to it,
                 or put in its place
    """

    def __init__(self, info: HitInfo, activation: Any, dtype: Dtype) -> None:
        self.info = info
        self.point = info.point
        self.layer = info.block - 1 if info.block else None
        self.positions = range(info.first, info.end)
        self.activation = activation
        self._dtype = dtype
        self._shape: tuple[int, int] = tuple(activation.shape[1:])

    def __repr__(self) -> str:
        where = f"positions {self.positions.start} to {self.positions.stop - 1}"
        return f"<{type(self).__name__} at {self.point}, {where}>"

    @property
    def row_bytes(self) -> int:
        return self._shape[1] * ITEM_BYTES[self._dtype]

    def values(self, replacement: Any, rows: Sequence[int]) -> Values:
        """These rows of the replacement, to send; None: rows of the activation as it is now. Raises InvalidRequest for
        another shape or dtype."""
        return Values(self._dtype, len(rows), self._bits(replacement)[rows].tobytes())

    def _bits(self, replacement: Any) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The replacement's rows as whole numbers, [positions, …], which can be compared bit by bit."""
        value = self.activation if replacement is None else replacement
        shape, dtype = getattr(value, "shape", ()), dtype_of(value)
        if tuple(shape) not in (self._shape, (1, *self._shape)):
            raise InvalidRequest(
                f"the replacement is {list(shape)}, and the activation {[1, *self._shape]}: nothing has changed",
                field="replacement",
            )
        if dtype != self._dtype:
            raise InvalidRequest(
                f"the replacement is {dtype}, and the activation {self._dtype}: convert it; nothing has changed",
                field="replacement",
            )
        rows = array_of(value)[0].reshape(self._shape)
        return self._words(memoryview(rows.tobytes()), 0)

    def _words(self, memory: memoryview, offset: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The rows at `offset`, in numbers of 64 bits if a row is a multiple of that, otherwise of 16 bits."""
        import numpy as np

        word: type[np.unsignedinteger[Any]] = np.uint64 if self.row_bytes % 8 == 0 else np.uint16
        count = self._shape[0] * self.row_bytes // np.dtype(word).itemsize
        return np.frombuffer(memory, word, count, offset).reshape(self._shape[0], -1)
