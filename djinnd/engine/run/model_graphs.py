"""The CUDA graphs of a model while it serves: captured between steps, and given up where they cannot be.

serving ──► a shape is captured ─┬─► more shapes
                                 ├─► no memory: no further shapes
                                 └─► not possible: no graphs, until blocks or pages move
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

import torch

from djinnd.device import Device
from djinnd.device.cuda import CudaDevice
from djinnd.model.step.graphs import StepGraphs
from djinnd.model.step.last_tokens import LastTokens
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.step.shapes import Shape

log = logging.getLogger("djinnd.engine")


class ModelGraphs:
    """Owns the graphs of one model. All calls belong between two steps."""

    def __init__(
        self,
        name: str,
        model: PagedModel,
        device: Device,
        limits: tuple[int, int, int, int],
        last_tokens: LastTokens | None,
    ) -> None:
        """`limits`: `max_tokens`, `max_rows`, `width` and `max_kv` of StepGraphs. `last_tokens`: see there."""
        self._name = name
        self._model = model
        self._device = device
        self._limits = limits
        self._last_tokens = last_tokens
        self.are_given_up = False  # for good
        self.current: StepGraphs | None = None  # None: steps run eagerly
        self.renew()

    def renew(self) -> None:
        """Begins with no shape captured, on a GPU."""
        if isinstance(self._device, CudaDevice) and not self.are_given_up:
            self.current = StepGraphs(self._model, self._device, *self._limits, self._last_tokens)

    def drop(self) -> None:
        """Frees the graphs: they hold memory, and addresses of blocks and pages. Until `renew`, steps run eagerly."""
        self.current = None

    def give_up(self) -> None:
        """Drops the graphs for good: a step of this model needs code that cannot be captured."""
        self.current = None
        self.are_given_up = True

    def serve(self, shape: Shape | None) -> bool:
        """True if another step like one of this shape runs as fast as it ever will: by its graph, on a device without
        graphs, or without memory for one. None: no graph can replay that step."""
        if self.current is None:
            return not isinstance(self._device, CudaDevice)
        return shape is not None and not self.current.wants(shape)

    def compile(self) -> Iterator[None]:
        """Loads the kernels that steps use, before a request waits for one; see StepGraphs.compile."""
        if (graphs := self.current) is not None:
            parts = (True for _ in graphs.compile())
            while self._attempt(graphs, partial(next, parts, False)):
                yield

    def capture_next(self) -> bool:
        """Captures one graph that later steps may use, in about a tenth of a second. → False if there is none left."""
        return self.current is not None and self._attempt(self.current, self.current.capture_next)

    def capture(self, shape: Shape | None) -> None:
        """Captures a graph for the shape of the last pass, if that pays. None: no graph can replay that pass."""
        graphs = self.current
        if graphs is not None and shape is not None and graphs.wants(shape):
            self._attempt(graphs, lambda: graphs.capture(shape))

    def _attempt(self, graphs: StepGraphs, capture: Callable[[], object]) -> bool:
        """Calls `capture`. If a family's forward pass cannot be captured, it runs eagerly from then on. → True if the
        call did something."""
        try:
            return bool(capture())
        except torch.OutOfMemoryError as error:
            log.warning("graphs_full model=%s error=%s", self._name, error)
            graphs.stop_capturing()
        except RuntimeError as error:
            self._device.synchronize()  # raises again if the error is permanent
            log.warning("graphs_off model=%s error=%s", self._name, error)
            self.current = None
        self._model.placement.restart()  # it may have failed amid a pass
        return False
