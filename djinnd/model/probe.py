"""What a step does at points of the model beside computing: the seam at which edits are made and captures taken.

resid points lie between blocks, where the block loop is ours; attn, mlp and norm are the outputs of the family's own
modules, and are reached by forward hooks, put on for one run of the block or the epilogue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from djinn_client.points import Point, Where

INSIDE: tuple[Where, ...] = ("attn", "mlp")


class Probe(Protocol):
    """Of one step. Whoever runs the step calls `at` once at each of `points`, in the order of computing, on the step's
    stream; in a step that runs some of the blocks, from before the first to behind the last of those. norm and logits
    come only where logits are wanted, and once each time that they are."""

    @property
    def first(self) -> int:
        """No point is of a block below this one. Until the blocks below it have been launched, nobody asks for
        `points`, which may take the host as long to find as the device needs for a block."""

    @property
    def points(self) -> frozenset[Point]: ...

    def at(self, point: Point, value: Tensor) -> None:
        """`value`, in the model's dtype, is what the model goes on with when this returns, and may be changed in place;
        it must not be kept. [1, tokens, width], a row for each of the step's tokens as they are in its inputs; for norm
        and logits [1, picks, width or vocab], a row for each pick. Behind those there may be rows that pad."""


def look(probe: Probe, point: Point, value: Tensor) -> None:
    if point.block >= probe.first and point in probe.points:
        probe.at(point, value)


def looks_inside(probe: Probe, block: int) -> bool:
    """Whether it is shown more of the block than what lies before and behind it."""
    return block >= probe.first and any(Point(where, block) in probe.points for where in INSIDE)


def looks_behind(probe: Probe) -> bool:
    """Whether it is shown something of the epilogue."""
    return any(point.is_behind for point in probe.points)


@contextmanager
def watching(probe: Probe, modules: Mapping[Point, nn.Module]) -> Iterator[None]:
    """Until it is left, what these modules give is shown to the probe. What they return must be a tensor, or a tuple
    whose first is it, of one row a token."""
    with ExitStack() as hooks:
        for point, module in modules.items():
            if point in probe.points:
                hooks.enter_context(module.register_forward_hook(partial(_show, probe, point)))
        yield


def _show(probe: Probe, point: Point, module: nn.Module, arguments: Any, output: Any) -> None:
    value = output[0] if isinstance(output, tuple) else output
    probe.at(point, value if value.dim() == 3 else value.unsqueeze(0))
