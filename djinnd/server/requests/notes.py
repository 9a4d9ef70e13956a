"""Notes in the reply of a generation: hints that the caller did not ask for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from djinn_client.protocol import Generate, Generated, ModelInfo

WANTS_CHAT = (
    "the first token ended the output. This model has a chat template: chat() renders your text as a message and has "
    "it answered, while generate() only continues it"
)

QUANTISED = "the model's weights were quantised to {} when it was loaded: its checkpoint would give other results"


ROUNDED = "the session's keys and values are rounded to {}: without kv_dtype the model would give other results"


def notes_on(
    request: Generate, reply: Generated, tokens: Sequence[int], ends: Collection[int], has_chat: bool, info: ModelInfo
) -> list[str]:
    """`tokens`: the session's; `ends`: tokens with which the model ends a text or an answer."""
    is_one_token = reply.finish_reason == "stop" and reply.usage.generated_tokens == 1
    wants_chat = has_chat and request.text is not None and is_one_token and tokens[-1] in ends
    hints = [WANTS_CHAT] if wants_chat else []
    return [*hints, *notes_of(info)]


def notes_of(info: ModelInfo) -> list[str]:
    """The notes that come with every result of a model."""
    quantised = [QUANTISED.format(info.quantised)] if info.quantised else []
    return [*quantised, ROUNDED.format(info.kv_dtype)] if info.kv_dtype else quantised
