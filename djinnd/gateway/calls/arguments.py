"""The arguments of a tool call as an object, as Anthropic's and Ollama's APIs have them, and as JSON."""

from __future__ import annotations

import json
from typing import Any

from djinn_client.protocol.fields.chat import ToolCall


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Parses the arguments. A text that is cut off or no JSON object comes under the key INVALID_JSON, as Anthropic
    advises."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": call.arguments}


def arguments_text(arguments: Any) -> str:
    """Writes the spaces that models write, so that a call in a transcript has the tokens of the answer."""
    return json.dumps(arguments, ensure_ascii=False)
