"""Finds the engine for a model. There is one engine now; the placement of models on several belongs here."""

from __future__ import annotations

from djinnd.server.engines.engine_client import EngineClient
from djinnd.server.engines.supervisor import Supervisor


class Router:
    """Maps models to engines."""

    def __init__(self, supervisors: list[Supervisor]) -> None:
        assert len(supervisors) == 1, "placement on several engines is not there yet"
        self.supervisors = supervisors

    async def engine_for(self, model: str) -> EngineClient:
        """Returns the engine that has the model or will load it; waits until it is ready. Raises the errors of
        Supervisor.engine."""
        return await self.supervisors[0].engine()

    async def next_engine_for(self, model: str) -> EngineClient:
        """Returns the engine for the model like engine_for, but waits without a limit."""
        return await self.supervisors[0].next_engine()
