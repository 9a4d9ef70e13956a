"""Calls of a scripted daemon that stop at breakpoints, and the edits that clients make there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from djinn_client.protocol import (
    AddEdit,
    CloseSession,
    Done,
    EditAdded,
    Generate,
    Generated,
    ModelInfo,
    Timings,
    Usage,
)
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.edits import Captured, CapturedPoint
from djinn_client.protocol.fields.points import PointMap
from djinn_client.transport.shm import new_window
from tests.support.scripted_daemon import Line, ScriptedDaemon

WIDTH, FIRST = 3, 4
MODEL = ModelInfo(name="djinn-tiny", path="/t", points=PointMap(blocks=4, width=WIDTH, vocab=9, layers="model.layers"))
AT = HitInfo(breakpoint=2, point="model.layers.1", block=2, first=FIRST, end=FIRST + 3, prompt_end=FIRST + 3)


def play(daemon: ScriptedDaemon, *acts: Callable[[Line], Any], told: list[Any] | None = None, beside: Any = ()) -> str:
    """Opens a session, calls each of `acts` and closes it; their results are appended to `told`. → the daemon's
    address."""

    def script(line: Line) -> None:
        line.open_session()
        for act in acts:
            given = act(line)
            if told is not None:
                told.append(given)
        expect_close(line)

    return daemon.play(script, *beside)


def expect_close(line: Line) -> None:
    line.send(Done(id=line.expect(CloseSession).id))
    line.expect_hang_up()


def generated(request: Generate, **fields: Any) -> Generated:
    usage = Usage(prompt_tokens=3, generated_tokens=1, session_tokens=7, computed_tokens=3)
    given: dict[str, Any] = {"text": "x", "token_ids": [9], "finish_reason": "length", "usage": usage}
    return Generated(id=request.id, timings=Timings(queued=0.0, first_token=0.0, total=0.0), **given | fields)


def stop(
    line: Line, dtype: str = "float32", at: HitInfo = AT, width: int = WIDTH, *, captures: bool = False, **fields: Any
) -> Generate:
    """Answers a Generate with a hit. Each row has the number of its position. `captures`: answers with the points that
    the Generate captures instead."""
    request = line.expect(Generate)
    positions = at.end - at.first
    numbers = torch.arange(at.first, at.end, dtype=getattr(torch, dtype))[:, None].expand(positions, width).contiguous()
    data = numbers.view(torch.uint8).numpy().tobytes()
    offset = 8 * 16
    fd = new_window("hit", offset + len(data))
    os.pwrite(fd, data, offset)
    captured = Captured(
        dtype=dtype,  # type: ignore[arg-type]
        first=at.first,
        positions=positions,
        room=positions,
        nbytes=offset + len(data),
        points=[CapturedPoint(at.point, width, offset)],
    )
    ended: dict[str, Any] = {} if captures else {"finish_reason": "breakpoint", "hit": at}
    line.send_with(generated(request, captured=captured, **ended, **fields), [fd])
    os.close(fd)
    return request


def finish(line: Line, **fields: Any) -> Generate:
    request = line.expect(Generate)
    line.send(generated(request, **fields))
    return request


def take_edits(line: Line, count: int = 1) -> list[AddEdit]:
    edits = [line.expect(AddEdit)]
    line.send(EditAdded(id=edits[0].id, edit=1))
    return edits + (take_edits(line, count - 1) if count > 1 else [])


def rows(request: AddEdit) -> Any:
    dtype = getattr(torch, request.dtype)
    return torch.frombuffer(bytearray(request.values), dtype=dtype).view(request.rows, -1).float().tolist()
