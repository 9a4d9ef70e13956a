from __future__ import annotations

from tools.bench.plot import Bar, Span, bars, curve, spans
from tools.bench.stream.outcome import Found, Outcome, Results, Status


def outcome(step: float, streamed: int, plain: int | None) -> Outcome:
    found = Found(first_token_s=[], step_s={1: [step]}, streamed_bytes=streamed, resident_blocks=plain)
    return Outcome(status=Status.MEASURED, found=found)


def test_contenders_that_stream_or_were_meant_to_have_bars() -> None:
    contenders = {
        "resident": outcome(0.01, 0, 40),
        "plain": outcome(0.5, 20, 29),
        "accelerate": outcome(2.0, 20, None),
        "gpu-only": Outcome(status=Status.OUT_OF_MEMORY, note="figures"),
        "diffusers": Outcome(status=Status.SKIPPED, note="not installed"),
    }
    assert bars(Results(device="cuda:0", bus={128: 50.0}, memory_rate=1.0, contenders=contenders)) == [
        Bar("plain", 40.0, "", True),
        Bar("accelerate", 10.0, "", False),
        Bar("gpu-only", 0.0, "out of memory", False),
    ]


def test_spans_are_found_by_the_threads_name_or_id() -> None:
    named = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "engine 0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "copy"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "compute"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 9, "args": {"name": "host"}},
        {"ph": "X", "name": "block 3", "pid": 1, "tid": 8, "ts": 3000, "dur": 500},
        {"ph": "X", "name": "block 3", "pid": 1, "tid": 7, "ts": 1000, "dur": 1500},
        {"ph": "X", "name": "schedule", "pid": 1, "tid": 9, "ts": 0, "dur": 1},
        {"ph": "i", "name": "step", "pid": 1, "tid": 7, "ts": 0},
    ]
    expected = [Span("copy", "block 3", 0.0, 1.5), Span("compute", "block 3", 2.0, 0.5)]
    assert spans({"traceEvents": named}) == expected
    by_id = [
        {"ph": "X", "name": "block 3", "pid": "engine", "tid": "compute", "ts": 3000, "dur": 500},
        {"ph": "X", "name": "block 3", "pid": "copy", "tid": 0, "ts": 1000, "dur": 1500},
    ]
    assert spans(by_id) == expected
    assert spans([]) == []


def test_a_curve_is_in_seconds_and_gigabytes() -> None:
    assert curve([{"seconds": 0.5, "host": 2e9, "disk": 0.0}], "host") == ([0.5], [2.0])
