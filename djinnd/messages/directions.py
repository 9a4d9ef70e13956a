"""The base classes of all messages, by direction. A class below one of them is a message: it needs no other list."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

Answer = TypeVar("Answer", bound="CallAnswer")


class ToEngine(msgspec.Struct):
    """A message that the server sends. Its handler is in the table of the engine (engine.py)."""


class EngineCall(ToEngine, Generic[Answer]):
    """A message with a number, which EngineClient.call gives it. Answered by an `Answer`, or by Failed."""

    request: int


class FromEngine(msgspec.Struct):
    """A message that an engine sends. EngineClient receives it."""


class CallAnswer(FromEngine):
    """The final reply to the EngineCall with this number: EngineClient.call returns it."""

    request: int
