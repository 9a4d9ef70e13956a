"""The models that the daemon has."""

from __future__ import annotations

from djinn_client.protocol import ListModels, ModelInfo, Models
from djinnd.gateway.entry.request import HttpRequest


async def models(request: HttpRequest) -> list[ModelInfo]:
    async with request.link() as link:
        return (await link.call(ListModels(id=0), Models)).models
