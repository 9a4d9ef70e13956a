"""Requests that stop inside of the model: what is seen where they do is captured, and becomes their reply's."""

from __future__ import annotations

from collections.abc import Mapping

from djinn_client.errors import OutOfMemory
from djinnd.core.batch import Batch
from djinnd.core.request import Request
from djinnd.engine.deliveries import Deliveries
from djinnd.engine.model_runner import ModelRunner
from djinnd.engine.passage import waits

_Where = tuple[int, int, int]  # before which block, and the positions: first, end


class StopCaptures:
    """Of all models. A request is here from its start to its end."""

    def __init__(self, deliveries: Deliveries, runners: Mapping[str, ModelRunner]) -> None:
        self._deliveries = deliveries
        self._runners = runners
        self._open: dict[int, _Where | None] = {}  # by request: what is being captured for it

    def expect(self, request: Request) -> None:
        """It has begun. One that stops nowhere has no hit."""
        if request.stops:
            self._open[request.id] = None

    def capture(self, batch: Batch) -> list[tuple[Request, OutOfMemory]]:
        """Before the step: sees to it that rows which will wait are captured where they do. → whose are not, as the
        device has no room."""
        if not self._open:
            return []
        runner, refused = self._runners[batch.model], []
        for row in batch.rows:
            if row.request.id in self._open and waits(row, runner.model.num_blocks):
                session, request = row.session, row.request
                where = row.last_block, session.computed, len(session.tokens)
                if self._open[request.id] == where:
                    continue
                self._deliveries.drop(request)  # its pages were lost on the way, and all of it comes again
                self._open[request.id] = None
                try:
                    self._deliveries.open_hit(session, request, runner, row.last_block)
                except OutOfMemory as error:
                    refused.append((request, error))
                else:
                    self._open[request.id] = where
        return refused

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._open.pop(request.id, None)
