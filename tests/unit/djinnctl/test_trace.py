"""A trace as a file: its content, and the summary of `djinnctl trace`."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from djinn_client import Span, TraceReply
from djinn_client.protocol import Failure, GetTrace
from djinnctl.chrome_trace import TRACKS, chrome, gaps, summary, told
from djinnctl.cli import main
from tests.support.scripted_daemon import Line, ScriptedDaemon
from tools.bench import plot

SPANS = [
    Span("step", "step", 0.0, 900.0, {"model": "m", "rows": 2, "tokens": 2}),
    Span("copy", "block 1", 10.0, 400.0, {"bytes": 20_000_000}),
    Span("compute", "prologue", 20.0, 30.0),
    Span("compute", "block 0", 50.5, 350.25, {"place": "plain"}),
    Span("paging", "demote", 60.0, 0.0, {"bytes": 7}),
]


@pytest.fixture
def asked(daemon: ScriptedDaemon) -> list[GetTrace]:
    """The requests to the daemon, which answers with SPANS, or with none for less than a second."""
    requests: list[GetTrace] = []

    def answer(line: Line) -> None:
        line.welcome()
        request = line.expect(GetTrace)
        requests.append(request)
        if request.seconds < 0:
            line.send(Failure(id=request.id, code="invalid_request", message="seconds is -1"))
        else:
            line.send(TraceReply(id=request.id, device="cuda:0", spans=SPANS if request.seconds >= 1 else []))

    daemon.play(answer)
    return requests


def run(daemon: ScriptedDaemon, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["trace", *arguments, "--address", daemon.address])


def test_a_process_a_device_and_a_thread_a_track() -> None:
    events = chrome(TraceReply(id=0, device="cuda:0", spans=SPANS))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["cuda:0"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(threads.values()) == ["step", "compute", "copy", "paging"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(threads[event["tid"]], event["name"], event["ts"], event["dur"]) for event in complete] == [
        (span.track, span.name, span.start_us, span.duration_us) for span in SPANS
    ]
    assert {event["pid"] for event in events} == {0}


def test_a_copy_has_its_rate() -> None:
    events = chrome(TraceReply(id=0, device="cpu", spans=SPANS))["traceEvents"]
    args = [event["args"] for event in events if event["ph"] == "X"]
    assert args[1] == {"bytes": 20_000_000, "GB/s": 50.0}
    assert args[4] == {"bytes": 7}, "what took no time that could be measured has none"
    assert args[0] == SPANS[0].args


GAPS = [
    Span("copy", "block 1", 0.0, 100.0),
    Span("step", "step", 5.0, 150.0),
    Span("compute", "prologue", 5.0, 5.0),
    Span("compute", "epilogue", 140.0, 10.0),  # a wait inside a step is no gap between steps
    Span("pages up", "promote 3", 150.0, 600.0),
    Span("host", "messages", 160.0, 30.0),
    Span("step", "step", 200.0, 100.0),
    Span("compute", "prologue", 201.0, 9.0),
    Span("compute", "epilogue", 210.0, 90.0),
    Span("copy", "block 2", 250.0, 50.0),
    Span("pages down", "demote 1", 260.0, 1.0),
    Span("step", "step", 305.0, 45.0),
    Span("compute", "prologue", 305.0, 10.0),
    Span("copy", "block 1", 305.0, 95.0),
    Span("compute", "epilogue", 340.0, 10.0),
]


def test_gaps_are_between_steps_and_between_the_ring_s_copies() -> None:
    """Shorter ones than a device needs by itself are none."""
    assert gaps(GAPS) == [
        Span("compute gaps", "gap", 150.0, 51.0, {"until": "prologue"}),
        Span("copy gaps", "gap", 100.0, 150.0, {"until": "block 2"}),
    ]
    assert gaps(SPANS) == gaps(GAPS[:3]) == gaps([]) == []


def test_gaps_and_pages_have_tracks_of_their_own() -> None:
    reply = TraceReply(id=0, device="cuda:0", spans=GAPS)
    events = chrome(reply)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [names[thread] for thread in sorted(names)] == list(TRACKS)
    tracks: dict[str, list[tuple[float, float]]] = {name: [] for name in TRACKS}
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["tid"]]].append((event["ts"], event["ts"] + event["dur"]))
    assert tracks["compute gaps"] == [(150.0, 201.0)] and tracks["copy gaps"] == [(100.0, 250.0)]
    assert (len(tracks["pages up"]), len(tracks["pages down"])) == (1, 1)
    for one, other in (("compute", "compute gaps"), ("copy", "copy gaps")):
        both = sorted(tracks[one] + tracks[other])
        assert all(before[1] <= after[0] for before, after in pairwise(both))
    assert summary(reply, Path("f"))["gaps"] == pytest.approx({"compute": 51e-6, "copy": 150e-6})
    assert "15 spans, gaps: 0.051 ms of compute, 0.15 ms of copy; https" in told(summary(reply, Path("f")))


def test_the_file_is_what_the_plot_of_a_timeline_reads(
    daemon: ScriptedDaemon, asked: list[GetTrace], tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    result = run(daemon, "-o", str(file))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{file}: 1 steps of cuda:0 in 0.9 ms, 5 spans; https://ui.perfetto.dev shows it\n"
    assert (asked[0].steps, asked[0].seconds) == (4, 10.0)
    drawn = plot.spans(json.loads(file.read_text()))
    assert [(span.lane, span.name) for span in drawn] == [
        ("copy", "block 1"),
        ("compute", "prologue"),
        ("compute", "block 0"),
    ]
    assert drawn[2].began_ms == pytest.approx(0.0405) and drawn[2].lasted_ms == pytest.approx(0.35025)


def test_as_json_it_says_what_was_written(daemon: ScriptedDaemon, asked: list[GetTrace], tmp_path: Path) -> None:
    file = str(tmp_path / "trace.json")
    result = run(daemon, "-o", file, "--steps", "9", "--seconds", "1.5", "--json")
    expected = {"file": file, "device": "cuda:0", "steps": 1, "spans": 5, "gaps": {"compute": 0, "copy": 0}}
    assert json.loads(result.stdout) == expected | {"seconds": pytest.approx(0.0009)}
    assert (asked[0].steps, asked[0].seconds) == (9, 1.5)


def test_a_device_that_ran_nothing(daemon: ScriptedDaemon, asked: list[GetTrace], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    result = run(daemon, "-o", str(file), "--seconds", "0.5")
    assert (result.exit_code, result.stdout) == (0, f"{file} is empty: cuda:0 ran no step\n")
    assert plot.spans(json.loads(file.read_text())) == []


def test_a_refusal_writes_nothing(daemon: ScriptedDaemon, asked: list[GetTrace], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    result = run(daemon, "-o", str(file), "--seconds", "-1")
    assert (result.exit_code, result.stderr) == (1, "djinnctl: seconds is -1\n")
    assert not file.exists()


def test_a_file_that_cannot_be_written(daemon: ScriptedDaemon, asked: list[GetTrace], tmp_path: Path) -> None:
    result = run(daemon, "-o", str(tmp_path / "nowhere" / "trace.json"))
    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr
    assert asked == [], "it is known before anything is recorded"


def test_a_refusal_leaves_the_file_that_was_there(
    daemon: ScriptedDaemon, asked: list[GetTrace], tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    file.write_text("of yesterday")
    assert run(daemon, "-o", str(file), "--seconds", "-1").exit_code == 1
    assert file.read_text() == "of yesterday"
    assert run(daemon, "-o", str(file)).exit_code == 0
    assert len(plot.spans(json.loads(file.read_text()))) == 3


def test_no_daemon_and_wrong_usage(tmp_path: Path) -> None:
    for arguments in (("-o", str(tmp_path)), ("--steps", "some"), ("--seconds", "long"), ("m",)):
        assert CliRunner().invoke(main, ["trace", *arguments]).exit_code == 2, arguments
    for steps in ("0", "101", str(2**63)):
        result = CliRunner().invoke(main, ["trace", "--steps", steps])
        assert result.exit_code == 2 and "Invalid value for '--steps'" in result.stderr
    result = CliRunner().invoke(main, ["trace", "-o", str(tmp_path / "t.json"), "--address", "/nowhere/s"])
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
