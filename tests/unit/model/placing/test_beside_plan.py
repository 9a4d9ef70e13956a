from __future__ import annotations

import pytest

from djinnd.model.placing.beside_plan import BesideRates, Streamed, best_share, most_rows

GB = 1e9
# Llama-2-13B with 11 of 40 blocks streamed, packed: 476 MB a block, 318 of them the MLP's, which are 425 MB plain.
STREAMED = Streamed(nbytes=round(5.24 * GB), mlp_nbytes=round(0.318 * GB), device_s=0.007)


def rates(
    *, bus: float = 55, beside: float = 50, host: float = 56, more: dict[int, float] | None = None
) -> BesideRates:
    """GB/s. more: rows → how many times as long as one row."""
    alone = 0.425 / host
    return BesideRates(bus * GB, beside * GB, {1: alone, **{rows: alone * by for rows, by in (more or {}).items()}})


def test_bus_and_host_end_at_about_the_same_time() -> None:
    measured = rates()
    count = best_share(STREAMED, measured, 11)
    assert count == 7
    assert STREAMED.step_s(measured, 0, 1) == pytest.approx(0.0953, abs=1e-3)
    assert STREAMED.step_s(measured, count, 1) == pytest.approx(0.0603, abs=1e-3)
    assert all(STREAMED.step_s(measured, count, 1) <= STREAMED.step_s(measured, other, 1) for other in range(12))


def test_a_slow_host_takes_less_and_a_useless_one_nothing() -> None:
    assert best_share(STREAMED, rates(host=20), 11) == 3
    assert best_share(STREAMED, rates(host=4), 11) == 0
    assert best_share(STREAMED, rates(beside=10), 11) == 0  # the bus loses more than the host gains


def test_a_model_that_waits_for_its_device_leaves_the_host_nothing() -> None:
    assert best_share(Streamed(STREAMED.nbytes, STREAMED.mlp_nbytes, device_s=0.2), rates(), 11) == 0


def test_the_share_is_bounded() -> None:
    assert best_share(STREAMED, rates(), 3) == 3
    assert best_share(STREAMED, rates(), 0) == 0


def test_rows_end_where_the_bus_alone_is_as_fast() -> None:
    assert most_rows(STREAMED, rates(more={2: 1.0, 4: 1.1, 8: 1.5, 16: 3}), 7) == 8
    assert most_rows(STREAMED, rates(more={2: 4, 4: 1}), 7) == 1
