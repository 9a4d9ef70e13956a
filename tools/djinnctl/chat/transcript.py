"""A conversation in a file: JSON, for people, other programs and other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from djinn_client.handover.saved_session import replacing

ROLES = ("system", "user", "assistant")
Message = dict[str, Any]


class Transcript(msgspec.Struct):
    model: str
    messages: list[Message]


def save(path: Path, transcript: Transcript) -> None:
    """Writes the file anew; only its owner may read it. Raises OSError."""
    with replacing(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(transcript)))


def load(path: Path) -> Transcript:
    """Raises OSError, and ValueError if the file is no transcript."""
    try:
        transcript = msgspec.json.decode(path.read_bytes(), type=Transcript)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no saved conversation: {error}") from error
    for number, message in enumerate(transcript.messages):
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise ValueError(f"{path} is no saved conversation: message {number} has no role or no text")
    return transcript
