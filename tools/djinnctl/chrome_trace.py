"""A trace in Chrome's format, which Perfetto and chrome://tracing open: a process a device, a thread a track.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from djinn_client import Span, TraceReply
from djinnctl.units import interval

TRACKS = ("step", "compute", "copy")  # from the top


def chrome(reply: TraceReply) -> dict[str, Any]:
    """Times in microseconds. A copy has its rate beside its bytes."""
    threads = {track: number for number, track in enumerate(TRACKS, start=1)}
    for span in reply.spans:
        threads.setdefault(span.track, len(threads) + 1)
    events = [_named("process_name", 0, name=reply.device)]
    for track, thread in threads.items():
        events += [_named("thread_name", thread, name=track), _named("thread_sort_index", thread, sort_index=thread)]
    events += [_complete(span, threads[span.track]) for span in reply.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


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
    """What has been written where."""
    return {
        "file": str(file),
        "device": reply.device,
        "steps": sum(span.track == "step" for span in reply.spans),
        "spans": len(reply.spans),
        "seconds": max((span.start_us + span.duration_us for span in reply.spans), default=0.0) / 1e6,
    }


def told(written: dict[str, Any]) -> str:
    """The same for people."""
    if not written["spans"]:
        return f"{written['file']} is empty: {written['device']} ran no step"
    return (
        f"{written['file']}: {written['steps']} steps of {written['device']} in {interval(written['seconds'])}, "
        f"{written['spans']} spans; https://ui.perfetto.dev shows it"
    )
