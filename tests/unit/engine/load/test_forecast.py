"""Forecasts compared with measurements: a Llama-2-13B on an H200, 2026-11-22 (docs/results.md), and djinn-tiny on one
core of a Xeon (docs/log)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from djinnd.core.rates import Rates
from djinnd.engine.load.forecast import Forecast
from djinnd.engine.tuning import FORECAST
from djinnd.weights.plan import BlockPlace, BlockSize, PlacementPlan

RATES = Rates(bus=55.40e9, memory=3.90e12, reading=4.21e12, products={"bfloat16": 757e12}, launch=4e-6)
BLOCKS, PARAMETERS, HEAD_BYTES, TOKEN_BYTES = 40, 317_194_240, 327_680_000, 819_200
PLAIN, PACKED = BlockSize(634_408_960, None), BlockSize(634_408_960, 478_317_056)
STREAMED = {38 * number // 10 + 1 for number in range(11)}  # spread over the blocks; the last is near the end


def forecast(size: BlockSize, places: list[BlockPlace]) -> Forecast:
    slots = 3 if BlockPlace.STREAMED in places else 0
    plan = PlacementPlan((size,) * BLOCKS, tuple(places), slots * size.passing, 0, slots)
    return Forecast(plan, RATES, "bfloat16", BLOCKS * PARAMETERS, HEAD_BYTES, TOKEN_BYTES, FORECAST["cuda"])


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
    slow = replace(RATES, bus=RATES.bus / 2)
    for places, factor in ((RESIDENT, 1.0), (STREAMING, 2.0)):
        own = forecast(PLAIN, places)
        halved = replace(own, rates=slow)
        assert halved.step_s(1) == pytest.approx(factor * own.step_s(1), rel=0.01)


@pytest.mark.parametrize(("streamed", "fewer"), [(11, 8), (8, 4), (4, 0)])
def test_fewer_streamed_blocks_make_steps_faster(streamed: int, fewer: int) -> None:
    def step_s(count: int) -> float:
        places = [BlockPlace.STREAMED if index < count else BlockPlace.PLAIN for index in range(BLOCKS)]
        return forecast(PLAIN, places).step_s(1)

    assert step_s(streamed) > step_s(fewer)


def test_larger_blocks_take_longer() -> None:
    times = [forecast(BlockSize(PLAIN.plain * factor, None), RESIDENT).step_s(1) for factor in (1, 2, 3)]
    assert times == sorted(set(times))


def test_slower_launches_slow_a_resident_step() -> None:
    own = forecast(PLAIN, RESIDENT)
    slow = replace(own, rates=replace(RATES, launch=2 * RATES.launch))
    assert slow.step_s(1) > own.step_s(1) and slow.first_token_s(512) > own.first_token_s(512)


def test_a_dtype_with_slower_products_slows_the_first_token_of_a_long_prompt() -> None:
    rates = replace(RATES, products={**RATES.products, "float32": RATES.products["bfloat16"] / 10})
    half = replace(forecast(PLAIN, RESIDENT), rates=rates)
    assert replace(half, dtype="float32").first_token_s(512) > 5 * half.first_token_s(512)


def test_steps_of_a_small_model_on_the_cpu_take_the_time_of_their_calls_of_torch() -> None:
    rates = Rates(bus=10e9, memory=18.7e9, reading=22e9, products={"float32": 160e9}, launch=2.42e-6)
    places = (BlockPlace.PLAIN,) * 8
    plan = PlacementPlan((BlockSize(1_574_400, None),) * 8, places, 0, 0, 0)
    tiny = Forecast(plan, rates, "float32", 8 * 393_600, 1_572_864, 4096, FORECAST["cpu"])
    assert tiny.step_s(1) == pytest.approx(9.0e-3, rel=0.35)
    assert tiny.step_s(16) == pytest.approx(24.8e-3, rel=0.35)
    assert tiny.first_token_s(512) == pytest.approx(71.7e-3, rel=0.35)
