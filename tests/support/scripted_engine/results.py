"""The results of runs, as bytes for the server: scores of prompts, captured activations, and logits."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from djinn_client.protocol.fields.points import Point, PointMap
from djinnd import messages
from tests.support.scripted_engine.session import Session


def prompt_scores(session: Session) -> Iterator[messages.PromptScored]:
    """The scores of the run's prompt, if it wants them, in two parts. A token's log probability is minus the token, and
    each likely token's is 0."""
    run = session.run
    assert run is not None
    if run.prompt_logprobs is None:
        return
    scored, top = session.tokens[max(session.first, 1) : session.prompt_end], run.prompt_logprobs
    for part in (scored[:2], scored[2:]):
        values = b"".join(struct.pack(f"<{1 + top}f", -token, *[0.0] * top) for token in part)
        ids = struct.pack(f"<{top}i", *range(top)) * len(part)
        yield messages.PromptScored(run.request, len(part), values, ids)


def captured(
    points: PointMap, session: Session, seen: Sequence[Point], positions: int, more: int
) -> tuple[messages.CaptureLayout, bytes]:
    """float32 captures of `positions` positions. There is room for all that the run could have had: its prompt's, and
    `more`."""
    assert len(set(seen)) == len(seen)
    first = session.seen_from
    room = max(positions, session.prompt_end - first + more)
    widths = [points.width_at(point) for point in seen]
    offsets = [4 * room * sum(widths[:index]) for index in range(len(widths))]
    values = [first + row + session.shift(first + row) for row in range(positions)] + [0] * (room - positions)
    data = b"".join(constant_rows(values, width) for width in widths)
    return messages.CaptureLayout("float32", first, positions, room, len(data), offsets), data


def constant_rows(values: list[int], width: int) -> bytes:
    """float32 [values, width]: all entries of a row are its value."""
    return b"".join(struct.pack("<f", value) * width for value in values)
