"""The place where a call has stopped inside the model, with its activation: to read, to change, and to resume from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from djinn_client.errors import ProtocolError
from djinn_client.protocol import Generated
from djinn_client.protocol.fields.kv_layout import ITEM_BYTES
from djinn_client.tensors.arrays import window_array
from djinn_client.tensors.cache import mapped, placed
from djinn_client.tensors.resume_points import ResumePoint
from djinn_client.transport.exchange import close_all
from djinn_client.transport.shm import map_read_only

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Hit(ResumePoint):
    """A call that has stopped at a breakpoint: `run` and `resume` of a session return it. Beside what a
    ResumePoint has:

    activation   is mapped from the memory that the daemon has copied it into
    generated    what `generate` would have returned: the text of this call so far, its tokens, usage, timings
    breakpoint   the breakpoint's id
    """

    def __init__(self, generated: Generated, fds: list[int]) -> None:
        """Takes the descriptors. Raises ProtocolError if they do not match the reply."""
        again = [os.dup(fd) for fd in fds]
        try:
            captured, self._memory = mapped(generated, fds)
            info = generated.hit
            if info is None or len(captured.points) != 1 or captured.positions != info.end - info.first:
                raise ProtocolError(f"a hit of {info} came with {captured}")
            self._pristine = map_read_only(again[0], captured.nbytes)
        finally:
            close_all(again)
        (point,) = captured.points
        self._offset = point.offset
        start, size = point.offset // ITEM_BYTES[captured.dtype], captured.positions * point.width
        rows = window_array(self._memory, captured.dtype, (-1,))[start : start + size]
        self._mapped = placed(rows.reshape(1, captured.positions, point.width), point.name, captured)
        super().__init__(info, self._mapped, captured.dtype)
        self._given_out = False  # whether anyone has had the activation, and may have written to it
        self.generated = generated
        self.breakpoint = info.breakpoint
        self._written: set[int] = set()  # rows that an edit of this session has replaced while it is here

    @property
    def activation(self) -> Any:
        """See ResumePoint."""
        self._given_out = True
        return self._activation

    @activation.setter
    def activation(self, value: Any) -> None:
        self._given_out, self._activation = True, value

    def changes(self, replacement: Any) -> list[int]:
        """The rows to replace so that the call resumes with `replacement`, or, if that is None, with the activation as
        it is now. Raises InvalidRequest for another shape or dtype."""
        if replacement is None and not self._given_out:  # not even compared: 20 MB of it would take 8 ms
            return sorted(self._written)
        different = (self._bits(replacement) != self._window(self._pristine)).any(axis=1)
        return sorted(self._written | set(different.nonzero()[0].tolist()))

    def wrote(self, positions: Iterable[int]) -> None:
        """Notes that the session, while it is at this hit, has got an edit that replaces these positions."""
        self._written.update(position - self.positions.start for position in positions)

    def _bits(self, replacement: Any) -> npt.NDArray[np.unsignedinteger[Any]]:
        """See ResumePoint. The activation is not copied if it is still the mapped memory."""
        if replacement is self._mapped or (replacement is None and self._activation is self._mapped):
            return self._window(self._memory)
        return super()._bits(replacement)

    def _window(self, memory: memoryview) -> npt.NDArray[np.unsignedinteger[Any]]:
        return self._words(memory, self._offset)
