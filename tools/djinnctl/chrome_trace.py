"""A trace in Chrome's format, which Perfetto and chrome://tracing open: a process a device, a thread a track.

Beside the device's own tracks there are the host's, and those of its gaps, in which spans named `gap` say when it might
have done more:

    compute         │ prologue │ block 0 │ epilogue │            │ prologue │ …
    compute gaps                                    │    gap     │                 between two steps
    host                                            │ │ pages │  │                 what it did then
    copy            │ block 1 │ block 2 │             │ block 1 │ block 2 │         over the ring
    copy gaps                           │     gap     │

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from djinn_client import Span, TraceReply
from djinnctl.units import interval

TRACKS = ("step", "compute", "compute gaps", "host", "copy", "copy gaps", "pages up", "pages down")  # from the top
GAP_US = 10.0  # a device needs shorter ones between two copies or kernels


def chrome(reply: TraceReply) -> dict[str, Any]:
    """Times in microseconds. A copy has its rate beside its bytes. A track without a span is left out."""
    spans = [*reply.spans, *gaps(reply.spans)]
    there = dict.fromkeys(span.track for span in spans)
    threads = {track: TRACKS.index(track) + 1 for track in TRACKS if track in there}
    for track in there:
        threads.setdefault(track, len(TRACKS) + len(threads) + 1)
    events = [_named("process_name", 0, name=reply.device)]
    for track, thread in threads.items():
        events += [_named("thread_name", thread, name=track), _named("thread_sort_index", thread, sort_index=thread)]
    events += [_complete(span, threads[span.track]) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def gaps(spans: Sequence[Span]) -> list[Span]:
    """The times between two steps in which nothing was computed, and those between two copies over the ring, as spans
    on tracks of their own. `until` names the span after the gap. `spans`: by time."""
    began, computed, copied = ([span for span in spans if span.track == track] for track in ("step", "compute", "copy"))
    steps = [bisect_right(began, span.start_us, key=_start) for span in computed]
    between = [pair for pair, (one, next_) in zip(pairwise(computed), pairwise(steps), strict=True) if one != next_]
    return [*_gaps("compute gaps", between), *_gaps("copy gaps", pairwise(copied))]


def _gaps(track: str, pairs: Iterable[tuple[Span, Span]]) -> Iterator[Span]:
    for before, after in pairs:
        end = before.start_us + before.duration_us
        if after.start_us - end >= GAP_US:
            yield Span(track, "gap", end, after.start_us - end, {"until": after.name})


def _start(span: Span) -> float:
    return span.start_us


@contextmanager
def writable(file: Path) -> Iterator[None]:
    """Keeps the file open, so that an obstacle is known before there is anything to write. Its content stays. A new
    file is removed again if the block fails. Raises OSError."""
    was_there = file.exists()
    with file.open("a"):
        try:
            yield
        except BaseException:
            if not was_there:
                file.resolve().unlink(missing_ok=True)
            raise


def write(reply: TraceReply, file: Path) -> None:
    """Raises OSError."""
    file.write_text(json.dumps(chrome(reply)))


def _named(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": thread, "args": args}


def _complete(span: Span, thread: int) -> dict[str, Any]:
    args = dict(span.args)
    if "bytes" in args and span.duration_us > 0:
        args["GB/s"] = round(args["bytes"] / span.duration_us / 1e3, 2)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.track,
        "pid": 0,
        "tid": thread,
        "ts": span.start_us,
        "dur": span.duration_us,
        "args": args,
    }


def summary(reply: TraceReply, file: Path) -> dict[str, Any]:
    """A summary of the trace and its file: times in seconds, and the sums of gaps by track."""
    return {
        "file": str(file),
        "device": reply.device,
        "steps": sum(span.track == "step" for span in reply.spans),
        "spans": len(reply.spans),
        "gaps": {
            track: sum(gap.duration_us for gap in gaps(reply.spans) if gap.track == f"{track} gaps") / 1e6
            for track in ("compute", "copy")
        },
        "seconds": max((span.start_us + span.duration_us for span in reply.spans), default=0.0) / 1e6,
    }


def told(written: dict[str, Any]) -> str:
    """The same for people."""
    if not written["spans"]:
        return f"{written['file']} is empty: {written['device']} ran no step"
    idle = ", ".join(f"{interval(seconds)} of {track}" for track, seconds in written["gaps"].items() if seconds)
    return (
        f"{written['file']}: {written['steps']} steps of {written['device']} in {interval(written['seconds'])}, "
        f"{written['spans']} spans{f', gaps: {idle}' if idle else ''}; https://ui.perfetto.dev shows it"
    )
