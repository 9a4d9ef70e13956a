"""The models that the daemon has, and their tokenizers."""

from __future__ import annotations

from djinn_client.protocol import DescribeTokenizer, ListModels, ModelInfo, Models, TokenizerInfo
from djinnd.gateway.entry.request import HttpRequest


async def models(request: HttpRequest) -> list[ModelInfo]:
    async with request.pool.link() as link:
        return (await link.call(ListModels(id=0), Models)).models


async def model_called(request: HttpRequest, name: str) -> ModelInfo | None:
    return next((info for info in await models(request) if info.name == name), None)


async def tokenizer_of(request: HttpRequest, model: str) -> TokenizerInfo:
    """Loads the model if need be: only then is its chat template known."""
    async with request.pool.link() as link:
        return await link.call(DescribeTokenizer(id=0, model=model), TokenizerInfo)
