"""The calls for which the daemon chooses the session, for asyncio. Each has a connection of its own, so that as many as
wanted may run at once; cancelling a task that waits in one stops its work in the daemon."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from djinn_client.admin import stateless
from djinn_client.admin.embeddings import Embeddings
from djinn_client.admin.stateless import ConversedChatOptions, ConversedOptions, Pooling
from djinn_client.arguments.messages import Message
from djinn_client.protocol import Embedded, Generated
from djinn_client.transport.aio_steps import run
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
    request = stateless.conversed(model, prompt, options)
    return await run(stateless.call(address, token, request, Generated, on_progress))


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
    request = stateless.conversed_chat(model, said, options)
    return await run(stateless.call(address, token, request, Generated, on_progress))


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
    request = stateless.embed(model, inputs, pooling, normalize)
    return Embeddings(await run(stateless.call(address, token, request, Embedded, on_progress)))
