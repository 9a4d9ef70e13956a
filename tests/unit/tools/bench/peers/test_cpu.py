from __future__ import annotations

import itertools

import pytest

from tools.bench.peers import cpu
from tools.bench.peers.cpu import measure, ratios


class Side:
    """Stands for djinnd or transformers: its first measurement takes `factor` seconds, its second twice as long."""

    def __init__(self, factor: float) -> None:
        self._numbers, self._factor = itertools.count(1), factor

    def first_token(self, tokens: int) -> float:
        return next(self._numbers) * self._factor

    def step(self, sessions: int, context: int, tokens: int) -> float:
        return next(self._numbers) * self._factor * sessions


def test_a_ratio_above_one_says_that_djinnd_is_faster() -> None:
    assert ratios({"djinnd": [1.0, 4.0], "transformers": [2.0, 1.0]}) == [2.0, 0.25]


def test_each_figure_is_measured_on_both_sides_after_a_round_that_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "say", lambda progress: None)
    sides = {"djinnd": Side(1.0), "transformers": Side(10.0)}
    work = {"prompt": 512, "context": 8, "tokens": 4, "sessions": (2,), "rounds": 2}
    found = measure(sides, work)  # type: ignore[arg-type]
    assert found == {
        "first token of 512": {"djinnd": [2e3, 3e3], "transformers": [20e3, 30e3]},
        "step of 2": {"djinnd": [10e3, 12e3], "transformers": [100e3, 120e3]},
    }
