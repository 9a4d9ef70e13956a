"""`djinnctl trace` while sessions of a streamed model are served: from the daemon's processes into a file."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import ROOT, Daemon, clean_environ

STEPS = 3


def traced(daemon: Daemon, file: Path) -> list[dict[str, Any]]:
    """The complete events of a trace during which two sessions generate, by track."""
    ended = threading.Event()

    def generate() -> None:
        with djinn.Session(MODEL, address=daemon.address) as s:
            while not ended.is_set():
                s.generate("x = ", max_tokens=16, ignore_eos=True)
                s.truncate(0)

    users = [threading.Thread(target=generate) for _ in range(2)]
    for user in users:
        user.start()
    try:
        command = [sys.executable, "-m", "djinnctl", "trace", "-o", str(file), "--steps", str(STEPS), "--json"]
        environ = clean_environ() | {"DJINND_ADDRESS": daemon.address}
        told = json.loads(subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, check=True).stdout)
    finally:
        ended.set()
        for user in users:
            user.join()
    assert (told["file"], told["device"], told["steps"]) == (str(file), "cpu", STEPS)
    events = json.loads(file.read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    complete = [event | {"track": threads[event["tid"]]} for event in events if event["ph"] == "X"]
    gaps = [event for event in complete if event["name"] == "gap"]
    assert len(complete) == told["spans"] + len(gaps)
    for track in ("compute", "copy"):
        durations = [gap["dur"] for gap in gaps if gap["track"] == f"{track} gaps"]
        assert told["gaps"][track] == pytest.approx(sum(durations) / 1e6)
    return complete


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_trace_of_a_streamed_model(start_daemon: DaemonStarter, tmp_path: Path, packing: bool) -> None:
    daemon = start_daemon()
    with daemon.client() as client:
        info = client.load(MODEL, resident=1, slots=3, packing=packing)
        events = traced(daemon, tmp_path / "trace.json")
        assert client.status(check=True).integrity == []
    steps, compute, copies = (
        [event for event in events if event["track"] == track] for track in ("step", "compute", "copy")
    )
    for step in steps:
        assert step["args"]["model"] == MODEL and 1 <= step["args"]["rows"] <= 2
    blocks = [f"block {index}" for index in range(info.blocks)]
    assert [event["name"] for event in compute] == ["prologue", *blocks, "epilogue"] * STEPS
    streamed = [event["name"] for event in compute if event["args"].get("place") == "streamed"]
    assert len(streamed) == STEPS * info.blocks_streamed == STEPS * (info.blocks - 1)
    assert sorted(event["name"] for event in copies) == sorted(streamed)  # a block is one piece
    assert all(event["args"]["GB/s"] > 0 for event in copies)
    for track in ("compute", "copy"):
        there = [event for event in events if event["track"] in (track, f"{track} gaps")]
        for before, after in pairwise(sorted(there, key=lambda event: event["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_a_resident_model_copies_nothing(daemon: Daemon, tmp_path: Path) -> None:
    events = traced(daemon, tmp_path / "trace.json")
    assert {event["track"] for event in events} - {"compute gaps"} == {"step", "compute", "host"}
    assert {event["args"].get("place") for event in events if event["name"].startswith("block")} <= {"plain", "packed"}
