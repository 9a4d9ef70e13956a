"""Probe: the interface by which edits and captures read and change activations during a step.

resid points are between blocks, where djinnd's own loop calls the probe. attn, mlp and norm are outputs of the family's
modules; forward hooks call the probe there, and are registered for one run of the block or of the epilogue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from djinn_client.protocol.fields.points import Point, Where

INSIDE: tuple[Where, ...] = ("attn", "mlp")


class Probe(Protocol):
    """The reads and changes of one step.

    The code that runs the step calls `at` once at each of `points`, in the order of computation, on the step's stream.
    A step over a range of blocks calls it from before the first to behind the last block of the range. norm and logits
    come once for each computation of logits.
    """

    @property
    def first(self) -> int:
        """No point is in a block below this one. `points` is not read before the blocks below it have been launched,
        since finding the points may take the host as long as the device needs for a block."""

    @property
    def points(self) -> frozenset[Point]: ...

    def at(self, point: Point, value: Tensor) -> None:
        """Reads or changes `value` in place; the model continues with it. The probe must not keep it.

        value: the model's dtype, [1, tokens, width], one row for each token of the step's inputs; for norm and logits
            [1, logit_rows, width or vocab], one row for each token that gets logits. Padding rows may follow.
        """


def look(probe: Probe, point: Point, value: Tensor) -> None:
    """Calls the probe if `point` is one of its points."""
    if point.block >= probe.first and point in probe.points:
        probe.at(point, value)


def looks_inside(probe: Probe, block: int) -> bool:
    """Returns True if the probe has a point inside the block."""
    return block >= probe.first and any(Point(where, block) in probe.points for where in INSIDE)


def looks_behind(probe: Probe) -> bool:
    """Returns True if the probe has a point in the epilogue."""
    return any(point.is_behind for point in probe.points)


@contextmanager
def watching(probe: Probe, modules: Mapping[Point, nn.Module]) -> Iterator[None]:
    """Calls the probe with the outputs of these modules within the context. An output is a tensor with one row a token,
    or a tuple with such a tensor first."""
    with ExitStack() as hooks:
        for point, module in modules.items():
            if point in probe.points:
                hooks.enter_context(module.register_forward_hook(partial(_show, probe, point)))
        yield


def _show(probe: Probe, point: Point, module: nn.Module, arguments: Any, output: Any) -> None:
    value = output[0] if isinstance(output, tuple) else output
    probe.at(point, value if value.dim() == 3 else value.unsqueeze(0))
