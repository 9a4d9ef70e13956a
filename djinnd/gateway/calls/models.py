"""The models that the daemon has, and their tokenizers."""

from __future__ import annotations

from djinn_client.protocol import DescribeTokenizer, ListModels, ModelInfo, Models, TokenizerInfo
from djinnd.gateway.entry.request import HttpRequest


async def models(request: HttpRequest) -> list[ModelInfo]:
    async with request.pool.link() as link:
        return (await link.call(ListModels(id=0), Models)).models


async def served(request: HttpRequest) -> list[tuple[str, ModelInfo]]:
    """The names under which models are served: each model, and each model with a configured adapter."""
    infos = await models(request)
    return [(name, info) for info in infos for name in (info.name, *(f"{info.name}:{a}" for a in info.adapters))]


async def model_called(request: HttpRequest, name: str) -> ModelInfo | None:
    """The model of that name, or the model of MODEL:ADAPTER."""
    return next((info for known, info in await served(request) if known == name), None)


async def tokenizer_of(request: HttpRequest, model: str) -> TokenizerInfo:
    """Loads the model if need be: only then is its chat template known."""
    async with request.pool.link() as link:
        return await link.call(DescribeTokenizer(id=0, model=model), TokenizerInfo)
