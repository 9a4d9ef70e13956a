"""Captures the activations at breakpoints: a request that stops inside the model has them in its reply."""

from __future__ import annotations

from collections.abc import Mapping

from djinn_client.errors import OutOfMemory
from djinnd.core.batch import Batch
from djinnd.core.request import Request
from djinnd.engine.probes.partial_rows import waits
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.windows.deliveries import Deliveries

_Where = tuple[int, int, int]  # block to stop before; positions: first, end


class StopCaptures:
    """Captures at breakpoints, of all models. A request is in here from `expect` until `forget`."""

    def __init__(self, deliveries: Deliveries, runners: Mapping[str, ModelRunner]) -> None:
        self._deliveries = deliveries
        self._runners = runners
        self._open: dict[int, _Where | None] = {}  # by request: where its current capture is

    def expect(self, request: Request) -> None:
        """Registers a request that has begun. One without breakpoints is ignored."""
        if request.stops:
            self._open[request.id] = None

    def capture(self, batch: Batch) -> list[tuple[Request, OutOfMemory]]:
        """Called before the step: opens a capture for each row that will stop. → the requests for which the device has
        no room, with the error."""
        if not self._open:
            return []
        runner, refused = self._runners[batch.model], []
        for row in batch.rows:
            if row.request.id in self._open and waits(row, runner.model.num_blocks):
                session, request = row.session, row.request
                where = row.last_block, session.computed, len(session.tokens)
                if self._open[request.id] == where:
                    continue
                self._deliveries.drop(request)  # its pages were lost on the way, and all its positions run again
                self._open[request.id] = None
                try:
                    self._deliveries.open_hit(session, request, runner, row.last_block)
                except OutOfMemory as error:
                    refused.append((request, error))
                else:
                    self._open[request.id] = where
        return refused

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._open.pop(request.id, None)
