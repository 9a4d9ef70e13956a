"""Computations of the white-box table: shares, distances of logits, steps of a trace."""

from __future__ import annotations

import math

import pytest
import torch

from djinn_client.protocol import Span
from tools.bench.whitebox.table_measures import Joined, Steered, change, divergence, effect, joined, point_behind, share


def test_the_point_behind_some_blocks_is_the_last_ones_output() -> None:
    assert [point_behind(depth) for depth in (1, 40)] == ["blocks.0.hook_resid_post", "blocks.39.hook_resid_post"]


def test_the_share_compares_tokens_position_by_position() -> None:
    assert share([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 4, 3], [5, 6, 7, 8]]) == 0.75
    with pytest.raises(ValueError, match="shorter"):
        share([[1, 2]], [[1]])


def test_the_divergence_compares_distributions_and_not_logits() -> None:
    even, steep = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3), 0.0]])  # 1/2, 1/2 and 3/4, 1/4
    assert divergence(even, steep) == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert divergence(steep, even) == pytest.approx(0.75 * math.log(3 / 2) + 0.25 * math.log(1 / 2))
    assert divergence(steep, steep + 7) == pytest.approx(0)  # the same distribution
    both = torch.cat([even, steep]), torch.cat([steep, steep])
    assert divergence(*both) == pytest.approx(divergence(even, steep) / 2)  # the mean over positions


def test_the_change_is_relative_to_the_logits_length() -> None:
    plain = torch.tensor([[3.0, 4.0]])
    assert change(plain, plain * 0.9) == pytest.approx(0.1) and change(plain, plain) == 0


def test_the_effect_covers_all_prompts() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    plain = [Steered(logits, [1, 2]), Steered(logits, [3, 4])]
    found = effect(plain, [Steered(logits, [1, 9]), Steered(2 * logits, [9, 9])])
    assert found["differ"] == 0.75 and found["change"] == pytest.approx(0.5)
    assert found["divergence"] == pytest.approx(divergence(logits, 2 * logits) / 2)
    assert effect(plain, plain) == {"differ": 0, "divergence": 0, "change": 0}


def steps(*told: tuple[float, int, float]) -> list[Span]:
    """Steps from triples: start, rows, and microseconds of duration."""
    return [Span("step", "step", start, took, {"rows": rows}) for start, rows, took in told]


def test_steps_that_a_call_joins_are_compared_with_undisturbed_steps() -> None:
    quiet = [(0, 1, 80), (100, 1, 80), (200, 1, 70)]  # the second of them: a call comes behind the third
    once = [(300, 2, 95), (450, 1, 60), (560, 1, 80), (660, 1, 80)]
    twice = [(760, 2, 80), (860, 2, 90), (990, 1, 80), (1110, 1, 80), (1210, 2, 80), (1310, 1, 80)]
    spans = steps(*quiet, *once, *twice)
    spans[3:3] = [Span("compute", "block 0", 260.0, 10.0), Span("copy", "promote 1", 270.0, 10.0)]
    found = joined(spans)  # at 300 and at 860; the last one's turn is not over
    wanted = ((15e-6, 60e-6), (10e-6, 50e-6))
    assert found == [Joined(pytest.approx(step), pytest.approx(turn)) for step, turn in wanted]


def test_a_trace_without_an_undisturbed_step_gives_nothing() -> None:
    assert joined(steps((0, 1, 80), (100, 2, 90), (200, 1, 80), (300, 1, 80), (400, 2, 90))) == []
