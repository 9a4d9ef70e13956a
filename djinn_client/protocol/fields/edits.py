"""Edits of activations, and the form of captured activations."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from djinn_client.protocol.fields.bounds import MAX_LIST, Name, Whole

Op = Literal["add", "scale", "project_out", "replace", "clamp"]


class EditInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An edit of a session. `spans`: the positions that it changes, from the first up to, but not including, the
    second; None: to the end."""

    id: int
    points: list[str]
    op: Op
    scale: float = 1.0
    low: float | None = None
    high: float | None = None
    spans: list[tuple[int, int | None]]
    nbytes: int = 0  # of its values


class CapturedPoint(msgspec.Struct, frozen=True, array_like=True):
    name: Name  # as it was asked for; of a pattern with `*`, with the block in its place
    width: Whole
    offset: Whole  # bytes in the window, of its first position


class Captured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The window that comes with it has `room` rows of the dtype for each point. The first `positions` of them are
    filled, with the session's positions from `first` on."""

    dtype: Literal["float32", "bfloat16", "float16"]
    first: Whole
    positions: Whole
    room: Whole
    nbytes: Whole  # of the window
    points: Annotated[list[CapturedPoint], msgspec.Meta(max_length=MAX_LIST)]
