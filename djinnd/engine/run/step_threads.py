"""How many threads compute a decode step on a CPU: as many as have turned out to be fastest.

A step of few tokens is hundreds of short operations. A thread that has to be woken for each of them may cost more time
than it saves, above all where other programs keep the cores busy. So now and then a few steps run with half or twice as
many threads, and the faster number stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch

from djinnd.core.batch import Batch
from djinnd.engine.tuning import (
    CLEARLY_FASTER,
    FIRST_THREAD_TRIAL,
    HOPELESS,
    RAREST_THREAD_TRIAL,
    THREAD_TRIAL_STEPS,
)


class ThreadChoice:
    """The number of threads for steps of one size: at first `most`, which is above 1. In a trial, every third step runs
    with another number, so that other work on the machine falls on both."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._threads = most
        self._times: deque[float] = deque(maxlen=2 * THREAD_TRIAL_STEPS)  # seconds of the last steps with `_threads`
        self._trial_times: list[float] = []
        self._tries_fewer = True
        self._plan_trial(FIRST_THREAD_TRIAL)

    def _plan_trial(self, wait: int) -> None:
        """The next trial begins after so many steps."""
        self._wait = self._steps_left = wait
        self._trial_times.clear()
        self._tries_fewer = self._threads == self._most or (self._tries_fewer and self._threads > 1)
        self._tried = self._threads // 2 if self._tries_fewer else min(2 * self._threads, self._most)

    @property
    def threads(self) -> int:
        """For the next step."""
        return self._threads if self._steps_left else self._tried

    def took(self, seconds: float) -> None:
        """The next step has run with `threads`."""
        if self._steps_left:
            self._times.append(seconds)
            self._steps_left -= 1
            return
        self._trial_times.append(seconds)
        usual = median(self._times)
        if seconds > HOPELESS * usual:
            self._keep()
        elif len(self._trial_times) < THREAD_TRIAL_STEPS:
            self._steps_left = 2
        elif median(self._trial_times) < CLEARLY_FASTER * usual:
            self._change()
        else:
            self._keep()

    def _keep(self) -> None:
        self._tries_fewer = not self._tries_fewer
        self._plan_trial(min(2 * self._wait, RAREST_THREAD_TRIAL))

    def _change(self) -> None:
        self._threads = self._tried
        self._times.clear()
        self._plan_trial(FIRST_THREAD_TRIAL)


class StepThreads:
    """The choices of one model, by the number of rows: 1, 2 to 3, 4 to 7, and so on."""

    def __init__(self) -> None:
        self._choices: dict[int, ThreadChoice] = {}

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        """Sets the threads for a step of this batch. Outside of decode steps, torch has all its threads."""
        most = torch.get_num_threads()
        if most == 1 or not batch.decode_only:
            yield
            return
        choice = self._choices.setdefault(len(batch.rows).bit_length(), ThreadChoice(most))
        began = perf_counter()
        torch.set_num_threads(choice.threads)
        try:
            yield
        finally:
            torch.set_num_threads(most)
            choice.took(perf_counter() - began)
