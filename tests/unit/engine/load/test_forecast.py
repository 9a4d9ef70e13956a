"""Forecasts compared with measurements: a Llama-2-13B on an H200, 2026-11-22 (docs/results.md)."""

from __future__ import annotations

import pytest

from djinnd.device import Rates
from djinnd.engine.load.forecast import Forecast
from djinnd.weights.plan import BlockPlace, BlockSize, PlacementPlan

RATES = Rates(bus=55.40e9, memory=3.90e12, products=757e12)
BLOCKS, PARAMETERS, TOKEN_BYTES = 40, 317_194_240, 819_200
PLAIN, PACKED = BlockSize(634_408_960, None), BlockSize(634_408_960, 478_317_056)
STREAMED = {38 * number // 10 + 1 for number in range(11)}  # spread over the blocks; the last is near the end


def forecast(size: BlockSize, places: list[BlockPlace]) -> Forecast:
    slots = 3 if BlockPlace.STREAMED in places else 0
    plan = PlacementPlan((size,) * BLOCKS, tuple(places), slots * size.passing, 0, slots)
    return Forecast(plan, RATES, BLOCKS * PARAMETERS, TOKEN_BYTES)


RESIDENT, ALL_PACKED = [BlockPlace.PLAIN] * BLOCKS, [BlockPlace.PACKED] * BLOCKS
STREAMING = [BlockPlace.STREAMED if index in STREAMED else BlockPlace.PLAIN for index in range(BLOCKS)]


@pytest.mark.parametrize(
    ("size", "places", "sessions", "found"),
    [
        (PLAIN, RESIDENT, 1, 7.35e-3),
        (PLAIN, RESIDENT, 16, 10.07e-3),
        (PLAIN, STREAMING, 1, 125.96e-3),  # this and the next: an earlier run, in the log
        (PLAIN, STREAMING, 16, 125.95e-3),
        (PACKED, STREAMING, 1, 94.42e-3),
        (PACKED, STREAMING, 16, 94.52e-3),
        (PACKED, ALL_PACKED, 1, 6.73e-3),
        (PACKED, ALL_PACKED, 16, 20.15e-3),
    ],
)
def test_step_times_are_within_a_tenth(size: BlockSize, places: list[BlockPlace], sessions: int, found: float) -> None:
    assert forecast(size, places).step_s(sessions) == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(
    ("size", "places", "found"),
    [
        (PLAIN, RESIDENT, 22.48e-3),
        (PACKED, ALL_PACKED, 34.41e-3),
        (PLAIN, STREAMING, 94.2e-3),  # docs/log, "Does the ring keep the bus full?"
        (PACKED, STREAMING, 74.79e-3),
    ],
)
def test_first_token_times_are_within_a_tenth(size: BlockSize, places: list[BlockPlace], found: float) -> None:
    assert forecast(size, places).first_token_s(512) == pytest.approx(found, rel=0.1)


def test_a_slower_bus_slows_only_streamed_steps() -> None:
    slow = Rates(RATES.bus / 2, RATES.memory, RATES.products)
    for places, factor in ((RESIDENT, 1.0), (STREAMING, 2.0)):
        own = forecast(PLAIN, places)
        halved = Forecast(own.plan, slow, own.parameters, own.token_bytes)
        assert halved.step_s(1) == pytest.approx(factor * own.step_s(1), rel=0.01)
