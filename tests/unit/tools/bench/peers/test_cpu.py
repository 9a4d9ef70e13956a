from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tools.bench.peers import cpu
from tools.bench.peers.cpu import Side as Measured
from tools.bench.peers.cpu import measure, ratios, shown, with_llama


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


TIMES = {"djinnd": [1.0, 2.0], "transformers": [2.0, 8.0], "llama.cpp": [0.5, 1.0]}


def test_each_peer_has_its_times_and_its_ratios() -> None:
    (row,) = zip(*(column.cells for column in shown({"step of 1": TIMES}, "CPU", {}).columns), strict=True)
    assert row == ("step of 1", "1.5", "5.0", "3.00, 2.00 to 4.00", "0.8", "0.50, 0.50 to 0.50")


def test_a_program_that_is_missing_stands_in_the_place_of_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sides: dict[str, Measured] = {}
    absent = with_llama(sides, tmp_path / "m.gguf", (1, 8))
    assert (sides, absent) == ({}, {"llama.cpp": "llama-bench is not on the PATH"})
    table = shown({"step of 1": {"djinnd": [1.0], "transformers": [2.0]}}, "CPU", absent)
    assert (table.columns[-1].header, *table.columns[-1].cells) == ("llama.cpp", "llama-bench is not on the PATH")
