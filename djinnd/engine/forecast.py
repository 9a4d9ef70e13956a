"""How fast a model would be in a residency plan: arithmetic on the device's measured rates.

A pass takes as long as its streamed bytes need on the bus, or as long as its blocks need to compute, whichever is
longer: the two overlap. Experts on demand come on top, because nothing computes while they are fetched. Computing a
block takes as long as its weights and the sessions' KV need to be read, or as long as its products need, whichever is
longer, and the small kernels beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from djinnd.device import Rates
from djinnd.model.projections import PACKED_ROWS
from djinnd.weights.plan import BlockSize, Place, Plan

# What our steps reach of the rates that the device measures of itself, on an H200 with a 13B model: docs/log.md.
_READING_ONE = 1.08  # of the memory's: a product with one row only reads, where the measured copy also writes
_READING_MORE = 1.0
_READING_PACKED_ONE = 0.97
_READING_PACKED = 0.76
_MULTIPLYING = 0.89  # of a large product's: a chunk of prefill
_FETCHING = 0.92  # of the bus's: experts on demand, which a kernel reads
_BLOCK_S = 26e-6  # of a block beside its products: norms, attention's latency, positions
_STEP_S = 330e-6  # of a step beside its blocks: prologue, epilogue, sampler, and the host's part
_CALL_S = 1.5e-3  # of a call beside its step: admission, journal, and the ways between three processes
CONTEXT = 512  # tokens of KV that each session has


@dataclass(frozen=True, slots=True)
class Forecast:
    """`parameters` counts the weights of all blocks that a row is multiplied with; `token_bytes` is the KV of a token
    in all blocks."""

    plan: Plan
    rates: Rates
    parameters: int
    token_bytes: int

    def step_s(self, sessions: int) -> float:
        """Of decoding, one token a session, pass after pass."""
        kv = sessions * CONTEXT * self.token_bytes / self.rates.memory
        fetching = self.plan.fetched_bytes(sessions) / (self.rates.bus * _FETCHING)
        return max(self.plan.passing_bytes / self.rates.bus, self._blocks_s(sessions) + kv + _STEP_S) + fetching

    def first_token_s(self, tokens: int) -> float:
        """Of a prompt, from a quiet daemon: the ring is full of the first blocks by then."""
        blocks = self._blocks_s(tokens)
        waiting = sum(self.plan.sizes[i].passing for i in self.plan.streamed[self.plan.slots :]) / self.rates.bus
        fetching = self.plan.fetched_bytes(tokens) / (self.rates.bus * _FETCHING)
        if not waiting:
            return blocks + fetching + _STEP_S + _CALL_S
        after_the_last = 1 - self.plan.streamed[-1] / len(self.plan.places)
        return max(waiting + after_the_last * blocks, blocks) + fetching + _STEP_S + _CALL_S

    def _blocks_s(self, rows: int) -> float:
        sizes = [size.needed(rows) for size in self.plan.sizes]
        blocks = list(zip(sizes, self.plan.places, strict=True))
        products = 2 * rows * self.parameters / (self.rates.products * _MULTIPLYING)
        reading = sum(self._reading_s(size, place, rows) for size, place in blocks)
        decoding = sum(self._decoding_s(size, place, rows) for size, place in blocks)
        return max(reading, products) + decoding + len(blocks) * _BLOCK_S

    def _reading_s(self, size: BlockSize, place: Place, rows: int) -> float:
        if place is Place.PACKED and rows <= PACKED_ROWS:
            return size.least / (self.rates.memory * (_READING_PACKED_ONE if rows == 1 else _READING_PACKED))
        return size.plain / (self.rates.memory * (_READING_ONE if rows == 1 else _READING_MORE))

    def _decoding_s(self, size: BlockSize, place: Place, rows: int) -> float:
        if place is Place.PLAIN or size.packed is None or (place is Place.PACKED and rows <= PACKED_ROWS):
            return 0.0
        return (size.packed + size.plain) / self.rates.memory
