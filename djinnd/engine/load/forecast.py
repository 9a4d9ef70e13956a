"""Estimates a model's speed for a residency plan, from the device's measured rates.

A pass takes the longer of two times, because they overlap: streaming its weights over the bus, and computing its
blocks. Fetching experts on demand adds to that, because nothing computes meanwhile. Computing a block takes the longer
of reading weights and KV, and of its matrix products, plus the small kernels. The device measures its rates at the
first load or plan (device/measuring.py). tuning.py has the part of each rate that steps reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from djinnd.core.rates import Rates
from djinnd.engine import tuning
from djinnd.model.tuning import PACKED_ROWS
from djinnd.weights.plan import BlockPlace, BlockSize, PlacementPlan

CONTEXT = 512  # tokens of KV in each session


@dataclass(frozen=True, slots=True)
class Forecast:
    """`parameters`: all weights that one row is multiplied with. `token_bytes`: KV of one token in all blocks."""

    plan: PlacementPlan
    rates: Rates
    dtype: str
    parameters: int
    token_bytes: int

    def step_s(self, sessions: int) -> float:
        """Seconds of a step that decodes one token for each session, in steady state."""
        kv = sessions * CONTEXT * self.token_bytes / self.rates.memory
        fetching = self.plan.fetched_bytes(sessions) / (self.rates.bus * tuning.FETCHING)
        computing = self._blocks_s(sessions) + kv + tuning.STEP_LAUNCHES * self.rates.launch
        return max(self.plan.passing_bytes / self.rates.bus, computing) + fetching

    def first_token_s(self, tokens: int) -> float:
        """Seconds until a prompt's first token. The daemon was idle, so the ring holds the first blocks."""
        blocks = self._blocks_s(tokens)
        waiting = sum(self.plan.sizes[i].passing for i in self.plan.streamed[self.plan.slots :]) / self.rates.bus
        fetching = self.plan.fetched_bytes(tokens) / (self.rates.bus * tuning.FETCHING)
        beside = fetching + (tuning.STEP_LAUNCHES + tuning.CALL_LAUNCHES) * self.rates.launch
        if not waiting:
            return blocks + beside
        after_the_last = 1 - self.plan.streamed[-1] / len(self.plan.places)
        return max(waiting + after_the_last * blocks, blocks) + beside

    def _blocks_s(self, rows: int) -> float:
        sizes = [size.needed(rows) for size in self.plan.sizes]
        blocks = list(zip(sizes, self.plan.places, strict=True))
        products = 2 * rows * self.parameters / (self.rates.products[self.dtype] * tuning.MULTIPLYING)
        reading = sum(self._reading_s(size, place, rows) for size, place in blocks)
        decoding = sum(self._decoding_s(size, place, rows) for size, place in blocks)
        return max(reading, products) + decoding + len(blocks) * tuning.BLOCK_LAUNCHES * self.rates.launch

    def _reading_s(self, size: BlockSize, place: BlockPlace, rows: int) -> float:
        if place is BlockPlace.PACKED and rows <= PACKED_ROWS:
            packed = tuning.READING_PACKED_ONE if rows == 1 else tuning.READING_PACKED
            return size.least / (self.rates.reading * packed)
        return size.plain / (self.rates.reading * (1.0 if rows == 1 else tuning.READING_MORE))

    def _decoding_s(self, size: BlockSize, place: BlockPlace, rows: int) -> float:
        if place is BlockPlace.PLAIN or size.packed is None or (place is BlockPlace.PACKED and rows <= PACKED_ROWS):
            return 0.0
        return (size.packed + size.plain) / self.rates.memory
