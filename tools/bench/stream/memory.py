"""Device memory of this process's descendants, sampled by NVML in a thread."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

PERIOD_S = 0.1
GRAIN = 16 << 20  # the smallest change in bytes that gets a point on the curve


class Meter(Protocol):
    """Returns the bytes in use."""

    def __call__(self) -> int: ...


class Phase(NamedTuple):
    name: str
    began: float
    ended: float


class Watched:
    """Filled at the end of a phase with the most bytes in use; None without a meter."""

    peak: int | None = None


class DeviceMemory:
    """Samples while its context lasts. With `meter` None there are no samples, and every peak is None."""

    def __init__(self, meter: Meter | None) -> None:
        self._meter = meter
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._peak = 0
        self.curve: list[tuple[float, int]] = []  # seconds since the start, bytes
        self.phases: list[Phase] = []
        self._thread = threading.Thread(target=self._sample, name="device-memory", daemon=True)

    @contextmanager
    def watch(self, name: str) -> Iterator[Watched]:
        """Watches one phase. Phases must not overlap."""
        watched = Watched()
        with self._lock:
            self._peak = 0
        began = self._now()
        try:
            yield watched
        finally:
            self.phases.append(Phase(name, began, self._now()))
            if self._meter is not None:
                with self._lock:
                    watched.peak = self._peak

    def begin_anew(self) -> None:
        """Forgets the peak of the phase so far."""
        with self._lock:
            self._peak = 0

    def __enter__(self) -> Self:
        if self._meter is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._meter is not None:
            self._thread.join()

    def _now(self) -> float:
        return round(time.monotonic() - self._began, 2)

    def _sample(self) -> None:
        assert self._meter is not None
        last = self._now(), 0
        while not self._stop.wait(PERIOD_S):
            now, used = self._now(), self._meter()
            with self._lock:
                self._peak = max(self._peak, used)
            if abs(used - (self.curve[-1][1] if self.curve else 0)) >= GRAIN:
                self.curve += [last, (now, used)] if not self.curve or last[0] > self.curve[-1][0] else [(now, used)]
            last = now, used


def nvml_meter(index: int = 0) -> Meter | None:
    """A meter by NVML, or None without NVML.

    Some drivers do not tell the memory of each process, as in some containers. Then the meter counts the device's use
    beyond the present.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, or no driver: NVML's errors have no base but Exception until it is imported
        return None
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    before = nvml.nvmlDeviceGetMemoryInfo(device).used

    told = False

    def used() -> int:
        nonlocal told
        ours = descendants(os.getpid())
        running = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        held = sum(process.usedGpuMemory or 0 for process in running if process.pid in ours)
        told = told or held > 0
        return held if told else max(0, nvml.nvmlDeviceGetMemoryInfo(device).used - before)

    return used


def descendants(pid: int) -> set[int]:
    """The process and all its descendants."""
    found = {pid}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        found.update(*(descendants(int(child)) for child in children))
    return found
