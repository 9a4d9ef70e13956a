"""Which engine has which model. One engine now; what places models on several belongs here."""

from __future__ import annotations

from djinnd.server.engine_client import EngineClient
from djinnd.server.supervisor import Supervisor


class Router:
    def __init__(self, supervisors: list[Supervisor]) -> None:
        assert len(supervisors) == 1, "placement on several engines is not there yet"
        self.supervisors = supervisors

    async def engine_for(self, model: str) -> EngineClient:
        """The engine that has, or is to have, the model; waits for it. Raises as Supervisor.engine."""
        return await self.supervisors[0].engine()

    async def next_engine_for(self, model: str) -> EngineClient:
        """The same, however long that takes."""
        return await self.supervisors[0].next_engine()
