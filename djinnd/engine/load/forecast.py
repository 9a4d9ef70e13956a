"""Estimates a model's speed for a residency plan, from the device's measured rates.

A pass takes the longer of two times, because they overlap: streaming its weights over the bus, and computing blocks and
head. Fetching experts on demand adds to that, because nothing computes meanwhile. Computing a block takes the longer of
reading its weights and of its matrix products, plus reading KV and the small operations. The device measures its rates
at the first load or plan (device/measuring.py). tuning.py has the part of each rate that steps reach, and the time of
small operations.
"""

from __future__ import annotations

from dataclasses import dataclass

from djinnd.core.rates import Rates
from djinnd.engine.tuning import ForecastTuning
from djinnd.model.tuning import PACKED_ROWS
from djinnd.weights.plan import BlockPlace, BlockSize, PlacementPlan

CONTEXT = 512  # tokens of KV in each session


@dataclass(frozen=True, slots=True)
class Forecast:
    """`parameters`: all weights of blocks that one row is multiplied with. `head_bytes`: the matrix that logits are
    computed with. `token_bytes`: KV of one token in all blocks."""

    plan: PlacementPlan
    rates: Rates
    dtype: str
    parameters: int
    head_bytes: int
    token_bytes: int
    tuning: ForecastTuning

    def step_s(self, sessions: int) -> float:
        """Seconds of a step that decodes one token for each session, in steady state."""
        kv = sessions * CONTEXT * self.token_bytes / (self.rates.memory * self.tuning.attending)
        computing = self._blocks_s(sessions) + kv + self._head_and_host_s()
        return max(self.plan.passing_bytes / self.rates.bus, computing) + self._fetching_s(sessions)

    def first_token_s(self, tokens: int) -> float:
        """Seconds until a prompt's first token. The daemon was idle, so the ring holds the first blocks."""
        blocks = self._blocks_s(tokens)
        waiting = sum(self.plan.sizes[i].passing for i in self.plan.streamed[self.plan.slots :]) / self.rates.bus
        call = self.tuning.call_launches * self.rates.launch
        beside = self._fetching_s(tokens) + self._head_and_host_s() + call
        if not waiting:
            return blocks + beside
        after_the_last = 1 - self.plan.streamed[-1] / len(self.plan.places)
        return max(waiting + after_the_last * blocks, blocks) + beside

    def _fetching_s(self, rows: int) -> float:
        return self.plan.fetched_bytes(rows) / (self.rates.bus * self.tuning.fetching)

    def _head_and_host_s(self) -> float:
        return self.head_bytes / self.rates.reading + self.tuning.step_launches * self.rates.launch

    def _blocks_s(self, rows: int) -> float:
        sizes = [size.needed(rows) for size in self.plan.sizes]
        blocks = list(zip(sizes, self.plan.places, strict=True))
        products = 2 * rows * self.parameters / (self.rates.products[self.dtype] * self.tuning.multiplying)
        reading = sum(self._reading_s(size, place, rows) for size, place in blocks)
        decoding = sum(self._decoding_s(size, place, rows) for size, place in blocks)
        return max(reading, products) + decoding + len(blocks) * self.tuning.block_launches * self.rates.launch

    def _reading_s(self, size: BlockSize, place: BlockPlace, rows: int) -> float:
        if place is BlockPlace.PACKED and rows <= PACKED_ROWS:
            packed = self.tuning.reading_packed_one if rows == 1 else self.tuning.reading_packed
            return size.least / (self.rates.reading * packed)
        return size.plain / (self.rates.reading * (1.0 if rows == 1 else self.tuning.reading_more))

    def _decoding_s(self, size: BlockSize, place: BlockPlace, rows: int) -> float:
        if place is BlockPlace.PLAIN or size.packed is None or (place is BlockPlace.PACKED and rows <= PACKED_ROWS):
            return 0.0
        return (size.packed + size.plain) / self.rates.memory
