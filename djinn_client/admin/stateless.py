"""Calls without a session of the caller's: each brings its whole prompt, and the daemon chooses the session.

See docs/guide/conversations.md for how it chooses, and docs/guide/embeddings.md for vectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypedDict, cast

from djinn_client.arguments import folders
from djinn_client.arguments.messages import Message, history
from djinn_client.arguments.options import (
    ChatOptions,
    GenerateOptions,
    build,
    chat_request,
    generate_request,
    token_ids,
)
from djinn_client.errors import InvalidRequest
from djinn_client.protocol import Class, Embed, Generate
from djinn_client.protocol.fields.bounds import pack
from djinn_client.protocol.fields.conversations import Conversation

Pooling = Literal["mean", "last"]


class OfConversations(TypedDict, total=False):
    """How the daemon finds the session of a call that names none.

    key              the session of the caller's earlier calls with this key, at most 256 characters; without a key, the
                     session whose tokens the prompt goes on from, if there is one, and else a new session
    after            the name of a record: the call goes on from there
    priority         the session's class; None (the default): the highest that the caller may have
    expected_wait_s  seconds until the conversation's next call, if the caller knows; the session's pages may leave the
                     device until then
    """

    key: str
    after: str
    priority: Class | None
    expected_wait_s: float


class ConversedOptions(GenerateOptions, OfConversations, total=False):
    """The keyword arguments of `djinn.generate`: OfConversations, and GenerateOptions without `n`."""


class ConversedChatOptions(ChatOptions, OfConversations, total=False):
    """The keyword arguments of `djinn.chat`: OfConversations, and ChatOptions without `n`."""


def conversed(model: str, prompt: str | Iterable[int], options: ConversedOptions) -> Generate:
    """Raises as `generate_request` does."""
    conversation, others = _conversation(model, options)
    request = generate_request("", prompt, cast(GenerateOptions, others), stream=False)
    request.conversation = conversation
    return request


def conversed_chat(model: str, said: str | Iterable[Message], options: ConversedChatOptions) -> Generate:
    """Raises as `generate_request` does."""
    conversation, others = _conversation(model, options)
    request = chat_request("", history(said, ()), cast(ChatOptions, others), stream=False)
    request.conversation = conversation
    return request


def embed(model: str, inputs: str | Iterable[str | Iterable[int]], pooling: Pooling | None, normalize: bool) -> Embed:
    """Raises InvalidRequest for inputs that are neither all texts nor all rows of token ids, TokenOutOfRange."""
    given = [inputs] if isinstance(inputs, str) else list(inputs)
    texts = [each for each in given if isinstance(each, str)]
    if texts and len(texts) < len(given):
        raise InvalidRequest("inputs are texts or rows of token ids: send both kinds in two calls", field="inputs")
    packed = [] if texts else [pack(token_ids(cast("Iterable[int]", each))) for each in given]
    fields = {"texts": texts, "packed": packed, "pooling": pooling or "", "normalize": normalize}
    return build(Embed, model=folders.model_name(model), **fields)


def _conversation(model: str, options: ConversedOptions | ConversedChatOptions) -> tuple[Conversation, dict[str, Any]]:
    """The conversation, and the options that are not about it."""
    names = OfConversations.__annotations__
    fields: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    fields["model"] = folders.model_name(model)
    conversation = build(Conversation, **fields)
    conversation.validate()
    return conversation, {name: value for name, value in options.items() if name not in names}
