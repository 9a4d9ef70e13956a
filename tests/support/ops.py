"""The operations of edits on rows of an activation, in PyTorch, each by its formula.

A vector is [width], or has one row for each edited row.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from djinn_client.protocol.fields.edits import Op

Act = Callable[[Tensor], Tensor]  # [rows, width] → the same


def add(vector: Tensor, scale: float = 1.0) -> Act:
    return lambda a: a + scale * _for(a, vector)


def scale(by: float) -> Act:
    return lambda a: a * by


def project_out(vector: Tensor, scale: float = 1.0) -> Act:
    unit = vector / vector.norm(dim=-1, keepdim=True)
    return lambda a: a - scale * _along(a, unit) * _for(a, unit)


def clamp(vector: Tensor, low: float | None, high: float | None) -> Act:
    unit = vector / vector.norm(dim=-1, keepdim=True)
    return lambda a: a + (_along(a, unit).clamp(low, high) - _along(a, unit)) * _for(a, unit)


def replace(vector: Tensor) -> Act:
    return lambda a: _for(a, vector).expand_as(a)


def act(op: Op, vector: Tensor, by: float, low: float, high: float) -> Act:
    """`vector`: ignored by `scale`."""
    match op:
        case "add":
            return add(vector, by)
        case "scale":
            return scale(by)
        case "project_out":
            return project_out(vector, by)
        case "replace":
            return replace(vector)
        case "clamp":
            return clamp(vector, low, high)


def _for(a: Tensor, vector: Tensor) -> Tensor:
    return vector if vector.dim() == 1 else vector[: len(a)]


def _along(a: Tensor, unit: Tensor) -> Tensor:
    return (a * _for(a, unit)).sum(dim=1, keepdim=True)
