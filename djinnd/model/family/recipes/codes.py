"""Joins the coded tensors of a checkpoint to one coded parameter, without decoding them.

Two tensors can be joined along their rows if both have the same code, and if the first one's rows are whole rows of
every part. One scale for a whole matrix would have to become two, so such a matrix is decoded instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from djinnd.weights.checkpoint import CheckpointFiles
from djinnd.weights.forms.coded_form import Code, Coded
from djinnd.weights.forms.coding import Coding


def stack_of_codes(checkpoint: CheckpointFiles, parts: list[list[str]], shape: tuple[int, ...]) -> Coded | None:
    """Joins the tensors of single experts to a stack, [count, rows, cols]. None if their codes cannot be joined.

    parts: the names of the tensors: for each part of an expert's rows, one tensor for each expert.
    """
    count, rows, cols = shape
    codings = {checkpoint.coding(name) for names in parts for name in names}
    (coding,) = codings if len(codings) == 1 else (None,)
    shapes = [checkpoint.tensors[names[0]].shape for names in parts if names]
    if coding is None or len(shapes) < len(parts) or any(len(names) != count for names in parts):
        return None
    if any(checkpoint.is_transposed(name) for names in parts for name in names):
        return None
    heights = [each[0] for each in shapes]
    equal = all(
        checkpoint.tensors[name].shape == own for names, own in zip(parts, shapes, strict=True) for name in names
    )
    if not equal or sum(heights) != rows or not joins(coding, heights, cols):
        return None
    return Coded(Code(coding), partial(_fill_stack, checkpoint, coding, parts, heights, (rows, cols)))


def joins(coding: Coding, heights: Sequence[int], cols: int) -> bool:
    """Returns True if matrices with these rows, one below the other, are one matrix of the code."""
    rows = sum(heights)
    steps = [part.step for part in coding.parts(rows, cols)]
    return len(heights) == 1 or all(height % step == 0 for height in heights for step in steps)


def _fill_stack(
    checkpoint: CheckpointFiles,
    coding: Coding,
    parts: list[list[str]],
    heights: list[int],
    shape: tuple[int, int],
    stack: Sequence[Tensor],
) -> None:
    steps = [part.step for part in coding.parts(*shape)]
    first = 0
    for names, height in zip(parts, heights, strict=True):
        for expert, name in enumerate(names):
            views = [
                part[expert : expert + 1, first // step : -(-(first + height) // step)]
                for part, step in zip(stack, steps, strict=True)
            ]
            checkpoint.read_parts(name, views)
        first += height
