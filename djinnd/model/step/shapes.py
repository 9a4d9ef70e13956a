"""The shapes of batches that a model has CUDA graphs for, and which of them a batch runs as.

    decode    1 token a row                         1, 2, 3, 4, 8 … 256 rows
    chunk     any rows, with or without history     16 … 2,048 tokens, up to 16, 64 or all rows

A shape is captured after its first step, which runs eagerly, or before that in an idle moment. Both together hold up
all sessions for 0.1 s. While sessions join and leave, a daemon would meet one decode shape after another. So a decode
batch that has no graphs of its own size runs as a larger shape for a while: one that has graphs, or the next power of
two, which then gets graphs for the smaller sizes, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace
from itertools import chain

from djinnd.model.tuning import (
    CHUNK_ROWS,
    CHUNK_TOKENS,
    DECODE_ROWS,
    PADDED_FROM_ROWS,
    PADDED_STEPS,
    ROWS_IN_ADVANCE,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Bounds of a batch. One set of graphs serves all batches within them.

    `adapters`: some tokens may have adapters. The graphs then hold the adapters' products, which the graphs of other
    shapes do not pay for.
    """

    tokens: int
    rows: int
    max_query: int  # tokens of the longest row
    adapters: bool = False


class Shapes:
    """Chooses shapes for one model. `captured` is a live view of the shapes that have graphs."""

    def __init__(self, max_tokens: int, max_rows: int, captured: Container[Shape], *, has_chunks: bool) -> None:
        """`has_chunks`: batches with several tokens a row have shapes."""
        self._captured = captured
        self._decode = [Shape(rows, rows, 1) for rows in _up_to(DECODE_ROWS, max_rows)]
        self._chunks = [
            [Shape(tokens, min(rows, tokens), tokens) for tokens in _up_to(CHUNK_TOKENS, max_tokens)]
            for rows in _up_to(CHUNK_ROWS, max_rows)
            if has_chunks
        ]
        self._padded: Counter[Shape] = Counter()  # steps that could have been these shapes, and ran as larger ones

    def in_advance(self) -> list[Shape]:
        """The shapes that are captured before a batch needs them, the first one at the end: the largest, so that the
        others reuse its memory, then from small to large, since small ones are needed first."""
        shapes = dict.fromkeys(shape for shapes in (self._decode, *self._chunks) for shape in shapes)
        *smaller, largest = sorted((s for s in shapes if s.rows <= ROWS_IN_ADVANCE), key=lambda shape: shape.tokens)
        return [*reversed(smaller), largest]

    def fitting(self, tokens: int, rows: int, longest: int, *, adapters: bool = False) -> Shape | None:
        """The smallest shape that holds the batch; None if none does. `longest`: tokens of its longest row."""
        if longest == 1:
            candidates = self._decode
        else:
            candidates = next((shapes for shapes in self._chunks if rows <= shapes[-1].rows), [])
        at = bisect_left(candidates, tokens, key=lambda shape: shape.tokens)
        return replace(candidates[at], adapters=adapters) if at < len(candidates) else None

    def serving(self, shape: Shape) -> Shape:
        """The shape as which a batch runs next, if `shape` is the smallest that holds it: itself, or a larger one of at
        most twice the rows."""
        is_settled = shape in self._captured or self._padded[shape] >= PADDED_STEPS
        if is_settled or shape.max_query > 1 or shape.rows < PADDED_FROM_ROWS:
            return shape
        larger = (each for each in self._decode if shape.rows < each.rows <= 2 * shape.rows)
        candidates = [shape, *(replace(each, adapters=shape.adapters) for each in larger)]
        with_graphs = (each for each in candidates if each in self._captured)
        powers_of_two = (each for each in candidates if each.rows.bit_count() == 1)
        found = next(chain(with_graphs, powers_of_two), shape)
        if found is not shape:
            self._padded[shape] += 1
        return found

    def padded(self) -> list[Shape]:
        """The shapes without adapters that have run as larger ones, the one with most of these steps first."""
        return [shape for shape, _ in self._padded.most_common() if not shape.adapters]


def _up_to(sizes: tuple[int, ...], largest: int) -> list[int]:
    return [size for size in sizes if size < largest] + [largest]
