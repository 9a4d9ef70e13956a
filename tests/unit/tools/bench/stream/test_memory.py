from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable

from tools.bench.stream.memory import DeviceMemory, descendants

PATIENCE = 60.0
GIB = 1 << 30


class ScriptedMeter:
    """Returns one figure after another, and the last one from then on. `said` is set when it has reached the last."""

    def __init__(self, figures: Iterable[int]) -> None:
        self._figures = list(figures)
        self.said = threading.Event()

    def __call__(self) -> int:
        if len(self._figures) > 1:
            return self._figures.pop(0)
        self.said.set()
        return self._figures[0]


def test_the_peak_belongs_to_the_watched_phase() -> None:
    meter = ScriptedMeter([0, 3 * GIB, GIB])
    with DeviceMemory(meter) as memory:
        with memory.watch("first") as first:
            assert meter.said.wait(PATIENCE)
        meter.said.clear()
        with memory.watch("second") as second:
            assert meter.said.wait(PATIENCE)
    assert (first.peak, second.peak) == (3 * GIB, GIB)
    assert [phase.name for phase in memory.phases] == ["first", "second"]
    assert memory.phases[0].ended <= memory.phases[1].began


def test_use_before_begin_anew_does_not_count_for_the_peak() -> None:
    meter = ScriptedMeter([0, 3 * GIB, GIB])
    with DeviceMemory(meter) as memory, memory.watch("handed over") as watched:
        assert meter.said.wait(PATIENCE)
        memory.begin_anew()
        meter.said.clear()
        assert meter.said.wait(PATIENCE)
    assert watched.peak == GIB


def test_the_curve_has_both_ends_of_every_change_and_no_more() -> None:
    meter = ScriptedMeter([GIB, GIB, GIB + 1, 2 * GIB, 2 * GIB, 0])
    with DeviceMemory(meter) as memory:
        assert meter.said.wait(PATIENCE)
    assert [used for _, used in memory.curve] == [0, GIB, GIB + 1, 2 * GIB, 2 * GIB, 0]
    assert [second for second, _ in memory.curve] == sorted(second for second, _ in memory.curve)


def test_without_a_meter_there_is_no_peak() -> None:
    with DeviceMemory(None) as memory, memory.watch("first") as watched:
        pass
    assert watched.peak is None and memory.curve == []


def test_children_of_children_are_descendants() -> None:
    grandchild = "import subprocess, sys; p = subprocess.Popen(['cat'], stdin=0); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin and child.stdout
        expected = {os.getpid(), child.pid, int(child.stdout.readline())}
        assert expected <= descendants(os.getpid())
        assert os.getppid() not in descendants(os.getpid())
        child.stdin.close()
