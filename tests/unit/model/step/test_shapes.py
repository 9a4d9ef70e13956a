from __future__ import annotations

from dataclasses import replace

import pytest

from djinnd.model.step.shapes import Shape, Shapes
from djinnd.model.tuning import DECODE_ROWS, PADDED_STEPS


def decode(rows: int, *, adapters: bool = False) -> Shape:
    return Shape(rows, rows, 1, adapters)


def shapes(*captured: int, max_rows: int = 256) -> tuple[Shapes, set[Shape]]:
    has_graphs = {decode(rows) for rows in captured}
    return Shapes(2048, max_rows, has_graphs, has_chunks=True), has_graphs


@pytest.mark.parametrize(
    ("rows", "captured", "expected"),
    [
        (48, [], 64),
        (48, [64], 64),
        (48, [96], 96),
        (48, [48, 64], 48),
        (48, [128], 64),
        (64, [], 64),
        (64, [96], 96),
        (64, [192, 256], 64),
        (8, [12], 8),
        (12, [8], 16),
        (12, [24], 24),
    ],
)
def test_rows_without_graphs_run_as_at_most_twice_as_many(rows: int, captured: list[int], expected: int) -> None:
    chosen, _ = shapes(*captured)
    assert chosen.serving(decode(rows)) == decode(expected)


def test_a_limit_of_rows_that_is_no_power_of_two_runs_as_itself() -> None:
    chosen, _ = shapes(max_rows=100)
    assert chosen.serving(decode(100)) == decode(100)
    assert chosen.serving(decode(96)) == decode(96), "the next power of two is beyond the limit"


def test_sessions_that_join_one_after_another_need_graphs_of_powers_of_two_only() -> None:
    chosen, captured = shapes()
    for rows in [*range(1, 257), *range(256, 0, -1)]:
        shape = chosen.fitting(rows, rows, 1)
        assert shape is not None
        ran = chosen.serving(shape)
        assert rows <= ran.rows
        captured.add(ran)  # as after each eager step
    small = {decode(rows) for rows in (1, 2, 3, 4, 8)}
    assert captured == small | {decode(rows) for rows in (16, 32, 64, 128, 256)}
    assert {*chosen.padded()} == {decode(rows) for rows in DECODE_ROWS} - captured


def test_a_shape_that_is_padded_for_long_gets_graphs_of_its_own() -> None:
    chosen, captured = shapes(64)
    for _ in range(PADDED_STEPS):
        assert chosen.serving(decode(48)) == decode(64)
    for _ in range(2):
        assert chosen.serving(decode(48)) == decode(48)
        captured.add(decode(48))
    assert chosen.serving(decode(24)) == decode(48), "other shapes have a count of their own"


def test_adapters_keep_to_graphs_with_adapters_and_wait_for_a_step_of_their_own() -> None:
    chosen, captured = shapes(64)
    assert chosen.serving(decode(48, adapters=True)) == decode(64, adapters=True)
    captured.add(decode(96, adapters=True))
    assert chosen.serving(decode(48, adapters=True)) == decode(96, adapters=True)
    assert chosen.serving(decode(48)) == decode(64)
    assert chosen.padded() == [decode(48)]


def test_chunks_run_as_the_smallest_shape() -> None:
    chosen, captured = shapes()
    shape = chosen.fitting(600, 12, 500)
    assert shape == Shape(768, 16, 768)
    captured.add(replace(shape, tokens=1024, max_query=1024))
    assert chosen.serving(shape) == shape


def test_the_largest_shape_is_captured_first_and_small_ones_next() -> None:
    chosen, _ = shapes()
    order = [*reversed(chosen.in_advance())]
    assert order[0].tokens == 2048 and order[1] == decode(1)
    assert [shape.tokens for shape in order[1:]] == sorted(shape.tokens for shape in order[1:])
    assert max(shape.rows for shape in order) == 64
