"""The calls of `Client` as functions: each makes a connection, calls, and closes it. `address` and `token` are as for
`Session`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from djinn_client.admin.client import Client
from djinn_client.admin.embeddings import Embeddings
from djinn_client.admin.stateless import ConversedChatOptions, ConversedOptions, Pooling
from djinn_client.api.client import Session
from djinn_client.arguments.messages import Message
from djinn_client.arguments.options import OfChats, PlacingOptions
from djinn_client.handover.saved_session import is_saved_session
from djinn_client.old_names import warn_of
from djinn_client.protocol import (
    BudgetReply,
    Class,
    Generated,
    ModelInfo,
    PauseReply,
    SessionInfo,
    StatusReply,
    Tier,
    TokenizerInfo,
    TraceReply,
)
from djinn_client.protocol.fields.placing import ModelPlan
from djinn_client.protocol.fields.scheduling import QuotaUse, Why
from djinn_client.transport.connection import OnProgress

if TYPE_CHECKING:
    from typing import Unpack


def status(*, check: bool = False, address: str | None = None, token: str | None = None) -> StatusReply:
    """The state of the daemon, as `djinnctl status --json` prints it. See Client.status."""
    with Client(address, token=token) as client:
        return client.status(check=check)


def models(*, address: str | None = None, token: str | None = None) -> list[ModelInfo]:
    """The models that the daemon knows, loaded or not."""
    with Client(address, token=token) as client:
        return client.models()


def points(model: str, *, address: str | None = None, token: str | None = None) -> list[str]:
    """See Client.points."""
    with Client(address, token=token) as client:
        return client.points(model)


def tokenize(
    model: str,
    said: str | Iterable[Message],
    *,
    add_special: bool = True,
    parse_special: bool = True,
    address: str | None = None,
    token: str | None = None,
    **chat: Unpack[OfChats],
) -> list[int]:
    """See Client.tokenize."""
    with Client(address, token=token) as client:
        return client.tokenize(model, said, add_special=add_special, parse_special=parse_special, **chat)


def detokenize(model: str, tokens: Iterable[int], *, address: str | None = None, token: str | None = None) -> str:
    """See Client.detokenize."""
    with Client(address, token=token) as client:
        return client.detokenize(model, tokens)


def tokenizer(model: str, *, address: str | None = None, token: str | None = None) -> TokenizerInfo:
    """See Client.tokenizer."""
    with Client(address, token=token) as client:
        return client.tokenizer(model)


def generate(
    model: str,
    prompt: str | Iterable[int],
    *,
    on_progress: OnProgress | None = None,
    address: str | None = None,
    token: str | None = None,
    **options: Unpack[ConversedOptions],
) -> Generated:
    """See Client.generate."""
    with Client(address, token=token) as client:
        return client.generate(model, prompt, on_progress=on_progress, **options)


def chat(
    model: str,
    said: str | Iterable[Message],
    *,
    on_progress: OnProgress | None = None,
    address: str | None = None,
    token: str | None = None,
    **options: Unpack[ConversedChatOptions],
) -> Generated:
    """See Client.chat."""
    with Client(address, token=token) as client:
        return client.chat(model, said, on_progress=on_progress, **options)


def embed(
    model: str,
    inputs: str | Iterable[str | Iterable[int]],
    *,
    pooling: Pooling | None = None,
    normalize: bool = True,
    on_progress: OnProgress | None = None,
    address: str | None = None,
    token: str | None = None,
) -> Embeddings:
    """See Client.embed."""
    with Client(address, token=token) as client:
        return client.embed(model, inputs, pooling=pooling, normalize=normalize, on_progress=on_progress)


def sessions(*, address: str | None = None, token: str | None = None) -> list[SessionInfo]:
    """See Client.sessions."""
    with Client(address, token=token) as client:
        return client.sessions()


def quotas(*, all: bool = False, address: str | None = None, token: str | None = None) -> list[QuotaUse]:
    """See Client.quotas."""
    with Client(address, token=token) as client:
        return client.quotas(all=all)


def load(
    model: str,
    *,
    kv_bytes: int = 0,
    host_kv_bytes: int | None = None,
    disk_kv_bytes: int | None = None,
    keep_alive_s: float | None = None,
    chat_template: str = "",
    on_progress: OnProgress | None = None,
    address: str | None = None,
    token: str | None = None,
    **placing: Unpack[PlacingOptions],
) -> ModelInfo:
    """Loads a model: see Client.load."""
    if is_saved_session(model):
        warn_of("load() of a saved session's file", "load_session()", stacklevel=2)
        return load_session(model, address=address, token=token, on_progress=on_progress)  # type: ignore[return-value]  # as before
    with Client(address, token=token) as client:
        return client.load(
            model,
            kv_bytes=kv_bytes,
            host_kv_bytes=host_kv_bytes,
            disk_kv_bytes=disk_kv_bytes,
            keep_alive_s=keep_alive_s,
            chat_template=chat_template,
            on_progress=on_progress,
            **placing,
        )


load_session = Session.load


def plan(
    model: str,
    *,
    memory_bytes: int = 0,
    kv_bytes: int = 0,
    address: str | None = None,
    token: str | None = None,
    **placing: Unpack[PlacingOptions],
) -> ModelPlan:
    """See Client.plan."""
    with Client(address, token=token) as client:
        return client.plan(model, memory_bytes=memory_bytes, kv_bytes=kv_bytes, **placing)


def set_budget(memory_bytes: int, *, address: str | None = None, token: str | None = None) -> BudgetReply:
    """See Client.set_budget."""
    with Client(address, token=token) as client:
        return client.set_budget(memory_bytes)


def trace(*, steps: int = 4, seconds: float = 10.0, address: str | None = None, token: str | None = None) -> TraceReply:
    """See Client.trace."""
    with Client(address, token=token) as client:
        return client.trace(steps=steps, seconds=seconds)


def unload(model: str, *, force: bool = False, address: str | None = None, token: str | None = None) -> None:
    """See Client.unload."""
    with Client(address, token=token) as client:
        client.unload(model, force=force)


def close(session: str, *, address: str | None = None, token: str | None = None) -> None:
    """Closes any of the caller's sessions by its id. Raises SessionNotFound."""
    with Client(address, token=token) as client:
        client.close_session(session)


def pause(session: str, tier: Tier = "host", *, address: str | None = None, token: str | None = None) -> PauseReply:
    """See Client.pause_session."""
    with Client(address, token=token) as client:
        return client.pause_session(session, tier)


def unpause(session: str, *, address: str | None = None, token: str | None = None) -> None:
    """See Client.unpause_session."""
    with Client(address, token=token) as client:
        client.unpause_session(session)


def set_priority(session: str, priority: Class, *, address: str | None = None, token: str | None = None) -> None:
    """See Client.set_priority."""
    with Client(address, token=token) as client:
        client.set_priority(session, priority)


def why(session: str, *, address: str | None = None, token: str | None = None) -> Why:
    """See Client.why."""
    with Client(address, token=token) as client:
        return client.why(session)
