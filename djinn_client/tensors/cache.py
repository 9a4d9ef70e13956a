"""Captured activations of a session, mapped from the window that the daemon passed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from djinn_client.errors import InvalidRequest, ProtocolError
from djinn_client.old_names import warn_of
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.edits import Captured
from djinn_client.protocol.fields.kv_layout import ITEM_BYTES
from djinn_client.protocol.fields.points import Point, PointMap
from djinn_client.protocol.replies import Generated
from djinn_client.tensors.arrays import window_array
from djinn_client.tensors.resume_points import ResumePoint
from djinn_client.transport.exchange import close_all
from djinn_client.transport.shm import map_window


class Cache(Mapping[str, Any]):
    """Activations by the names of their points, in the order of computing; a point is found by any of its names.

        cache["blocks.3.hook_resid_post"]       the same tensor as
        cache["model.layers.3"]

    Each is [1, positions, width] in the model's dtype: a torch tensor, or without torch a numpy array (bfloat16 then as
    uint16). It is writable and belongs to this process: writing to it changes no session until it is handed to
    `patch`. It knows its origin: `.point` is the name by which it was captured, and `.first` the session's position of
    row 0. Results of computations and slices do not have these.

    It has no gradients: see Session.capture.
    """

    def __init__(self, captured: Captured, memory: memoryview, generated: Generated, points: PointMap | None) -> None:
        """`points` None: the model was unloaded meanwhile; activations are then found by the requested names only."""
        self.positions = range(captured.first, captured.first + captured.positions)  # of the session
        self.generated = generated  # the reply of the same call without capturing
        self._points = points
        self._dtype = captured.dtype
        flat = window_array(memory, captured.dtype, (-1,))
        size = ITEM_BYTES[captured.dtype]
        self._tensors: dict[str, Any] = {}
        for point in captured.points:
            start = point.offset // size
            tensor = flat[start : start + captured.positions * point.width].reshape(1, captured.positions, point.width)
            self._tensors[point.name] = placed(tensor, point.name, captured)
        self._names: dict[Point, str] = {}
        if points is not None:
            found = points.resolve_all(self._tensors)
            for name in sorted(found, key=lambda name: points.order(found[name])):
                self._tensors[name] = self._tensors[self._names.setdefault(found[name], name)]

    def __getitem__(self, name: str) -> Any:
        """Raises KeyError for a point that was not captured."""
        if name in self._tensors:
            return self._tensors[name]
        if (point := self._point(name)) in self._names:
            return self._tensors[self._names[point]]
        raise KeyError(f"{name} was not captured; there are {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values() if self._points is not None else self._tensors)

    def __len__(self) -> int:
        return len(self._names if self._points is not None else self._tensors)

    def __repr__(self) -> str:
        where = f"{self.positions.start} to {self.positions.stop - 1}" if self.positions else "none"
        return f"<Cache of {len(self)} points at positions {where}: {', '.join(self)}>"

    def resume_point(self, name: str, end: int | None = None) -> ResumePoint:
        """A point to resume from: `session.resume_from(cache.resume_point(name))`. It has the positions before `end`;
        None is the prompt's end, so that all output is regenerated. Its activation shares this tensor's memory.

        Raises KeyError for a point that was not captured, InvalidRequest for one that is not between two blocks, and
        for positions that are not here."""
        tensor, point = self[name], self._point(name)
        if point is None or point.where != "resid":
            raise InvalidRequest(
                f"a session resumes between two blocks, and {name} is no such point of a model that is loaded: "
                "capture a block's output, such as blocks.3.hook_resid_post",
                field="point",
            )
        usage = self.generated.usage
        prompt_end = usage.session_tokens - usage.generated_tokens
        first, end = self.positions.start, prompt_end if end is None else end
        if not first < end <= self.positions.stop:
            raise InvalidRequest(
                f"a resume point ends behind one of the positions {first} to {self.positions.stop - 1}, not at {end}",
                field="end",
            )
        info = HitInfo(
            breakpoint=None,
            point=name,
            block=point.block,
            first=first,
            end=end,
            prompt_end=min(prompt_end, end),
        )
        return ResumePoint(info, tensor[:, : end - first], self._dtype)

    def checkpoint(self, name: str, end: int | None = None) -> ResumePoint:
        """The old name of `resume_point`."""
        warn_of("checkpoint", "resume_point", stacklevel=2)
        return self.resume_point(name, end)

    def _point(self, name: str) -> Point | None:
        if self._points is None or "*" in name:
            return None
        try:
            return self._points.resolve(name)[name]
        except InvalidRequest:
            return None


def mapped(generated: Generated, fds: list[int]) -> tuple[Captured, memoryview]:
    """Maps the window that came with the reply. Closes `fds`. Raises ProtocolError if it is not as announced."""
    try:
        captured = generated.captured
        if captured is None or len(fds) != 1:
            raise ProtocolError(f"captured activations came with {len(fds)} file descriptors")
        size = ITEM_BYTES[captured.dtype]
        ends = [point.offset + captured.room * point.width * size for point in captured.points]
        if (
            not 0 <= captured.positions <= captured.room
            or captured.first < 0
            or captured.nbytes % size
            or captured.nbytes < max(ends, default=1)
            or any(point.width < 1 or point.offset < 0 or point.offset % size for point in captured.points)
        ):
            raise ProtocolError(f"captured activations do not lie in their window of {captured.nbytes:,} bytes")
        return captured, map_window(fds[0], captured.nbytes)
    finally:
        close_all(fds)


def placed(tensor: Any, name: str, captured: Captured) -> Any:
    """The tensor, with its point and first position."""
    if hasattr(tensor, "__array_finalize__"):  # numpy's arrays take no attributes, but those of a subclass do
        from djinn_client.tensors.activation import Activation

        tensor = tensor.view(Activation)
        tensor.stored = captured.dtype
    tensor.point, tensor.first = name, captured.first
    return tensor
