"""The capture of one call: its points, the memory it takes, and how the reply describes it."""

from __future__ import annotations

from djinn_client.errors import InvalidRequest
from djinn_client.protocol import Generate, ModelInfo
from djinn_client.protocol.fields.edits import Captured, CapturedPoint
from djinn_client.protocol.fields.kv_layout import ITEM_BYTES
from djinn_client.protocol.fields.points import Point, PointMap
from djinnd.core.edits import now
from djinnd.messages import CaptureLayout
from djinnd.server.admission import admission
from djinnd.server.sessions.session import SessionRecord

MAX_CAPTURE_BYTES = 1 << 30  # in one call


class CallCapture:
    """`points` are the points that the engine captures. A point that the request names twice is captured once."""

    def __init__(self, names: dict[str, Point], model: PointMap) -> None:
        self.points = list(dict.fromkeys(names.values()))
        self.nbytes = 0  # largest size of its window
        self._names = names
        self._model = model

    @property
    def width(self) -> int:
        """Sum of the points' widths."""
        return sum(map(self._model.width_at, self.points))

    def told(self, capture: CaptureLayout, positions: int) -> Captured:
        """Describes to the client what the engine has captured. `positions`: how many of its positions the session
        keeps."""
        offsets = dict(zip(self.points, capture.offsets, strict=True))
        return Captured(
            dtype=capture.dtype,
            first=capture.first,
            positions=positions,
            room=capture.room,
            nbytes=capture.nbytes,
            points=[
                CapturedPoint(name, self._model.width_at(point), offsets[point]) for name, point in self._names.items()
            ],
        )


def capture_of(
    request: Generate, prompt_tokens: int, session: SessionRecord, model: ModelInfo, kept: int
) -> CallCapture | None:
    """The capture of a call behind the session's first `kept` tokens. Returns None if the request captures nothing.
    Raises InvalidRequest for unknown points, and for more than MAX_CAPTURE_BYTES."""
    if not request.capture:
        return None
    names = admission.points_named(request.capture, model, "capture")
    capture = CallCapture(names, admission.points_of(model))
    first, end = computed(request, prompt_tokens, session, model, kept)
    rows = end - first
    row_bytes = capture.width * ITEM_BYTES[model.dtype]  # type: ignore[index]
    if rows * row_bytes > MAX_CAPTURE_BYTES:
        raise InvalidRequest(
            f"{len(capture.points):,} points of {rows:,} positions are {rows * row_bytes:,} bytes of {model.dtype}; "
            f"the limit of a call is {MAX_CAPTURE_BYTES:,}: capture fewer points, or at most "
            f"{MAX_CAPTURE_BYTES // row_bytes:,} positions (the prompt's, and max_tokens)",
            field="capture",
            bytes=rows * row_bytes,
            limit=MAX_CAPTURE_BYTES,
            positions=rows,
        )
    capture.nbytes = rows * row_bytes
    return capture


def computed(
    request: Generate, prompt_tokens: int, session: SessionRecord, model: ModelInfo, kept: int
) -> tuple[int, int]:
    """The first position that the call computes behind `kept` tokens, and the end of the most that it may compute. It
    begins at the first position that is due, else at the prompt, else at the last token. The last generated token is
    computed by the next call."""
    first = min(session.due_from, kept if prompt_tokens else now(kept))
    return first, min(kept + prompt_tokens + max(request.most_tokens - 1, 0), model.max_context)
