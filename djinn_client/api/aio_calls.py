"""The calls of `AsyncClient` that need no session, as functions: each makes a connection, calls, and closes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from djinn_client.admin.embeddings import Embeddings
from djinn_client.admin.stateless import ConversedChatOptions, ConversedOptions, Pooling
from djinn_client.api.aio_client import AsyncClient
from djinn_client.arguments.messages import Message
from djinn_client.protocol import Generated
from djinn_client.transport.connection import OnProgress

if TYPE_CHECKING:
    from typing import Unpack


async def generate_async(
    model: str,
    prompt: str | Iterable[int],
    *,
    address: str | None = None,
    token: str | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[ConversedOptions],
) -> Generated:
    """See Client.generate."""
    async with AsyncClient(address, token=token) as client:
        return await client.generate(model, prompt, on_progress=on_progress, **options)


async def chat_async(
    model: str,
    said: str | Iterable[Message],
    *,
    address: str | None = None,
    token: str | None = None,
    on_progress: OnProgress | None = None,
    **options: Unpack[ConversedChatOptions],
) -> Generated:
    """See Client.chat."""
    async with AsyncClient(address, token=token) as client:
        return await client.chat(model, said, on_progress=on_progress, **options)


async def embed_async(
    model: str,
    inputs: str | Iterable[str | Iterable[int]],
    *,
    pooling: Pooling | None = None,
    normalize: bool = True,
    address: str | None = None,
    token: str | None = None,
    on_progress: OnProgress | None = None,
) -> Embeddings:
    """See Client.embed."""
    async with AsyncClient(address, token=token) as client:
        return await client.embed(model, inputs, pooling=pooling, normalize=normalize, on_progress=on_progress)
