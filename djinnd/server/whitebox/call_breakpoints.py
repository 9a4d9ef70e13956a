"""The breakpoints of one call: where it may stop, where it continues from, and how its reply describes a hit."""

from __future__ import annotations

from dataclasses import dataclass

from djinn_client.protocol import Generate, ModelInfo
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.edits import Captured, CapturedPoint
from djinnd.core.stops import Stop
from djinnd.messages import CaptureLayout, Finished
from djinnd.server.admission import breakpoints as breakpoint_admission
from djinnd.server.admission.admission import points_of
from djinnd.server.probe_lists.breakpoint_list import BreakpointList, CallSpan
from djinnd.server.sessions.session import SessionRecord


@dataclass(frozen=True, slots=True)
class CallBreakpoints:
    """`resume_block`: the block before which an earlier call has stopped, if this call continues from there."""

    stops: list[Stop]
    resume_block: int | None
    _reach: CallSpan
    _breakpoints: BreakpointList  # unchanged while the call runs
    _width: int

    def hit(self, message: Finished) -> HitInfo:
        assert message.stopped is not None and message.capture is not None
        first, end = message.capture.first, message.length
        met = self._breakpoints.met(message.stopped, end, self._reach)
        return HitInfo(
            breakpoint=met.number,
            point=met.point,
            block=message.stopped,
            first=first,
            end=end,
            prompt_end=self._reach.prompt_end,
        )

    def told(self, capture: CaptureLayout, hit: HitInfo) -> Captured:
        """Describes to the client the activation that came with the hit."""
        return Captured(
            dtype=capture.dtype,
            first=hit.first,
            positions=hit.end - hit.first,
            room=capture.room,
            nbytes=capture.nbytes,
            points=[CapturedPoint(hit.point, self._width, capture.offsets[0])],
        )


def breakpoints_of(
    request: Generate, prompt_tokens: int, session: SessionRecord, model: ModelInfo, kept: int
) -> CallBreakpoints:
    """The breakpoints of a call behind the session's first `kept` tokens. Raises InvalidRequest if the call cannot
    continue from a hit, or could stop at a place where stops are refused."""
    reach = breakpoint_admission.call_span(request, prompt_tokens, session, model, kept)
    stops = breakpoint_admission.stops_of(request, reach, session.breakpoints, model)
    resume_block = None if reach.hit is None else reach.hit.block
    return CallBreakpoints(stops, resume_block, reach, session.breakpoints, points_of(model).width)
