"""Finds the chat templates of a checkpoint.

    chat_template.jinja                      the default one
    additional_chat_templates/NAME.jinja     others by name
    tokenizer_config.json: chat_template     a text, or a list of {"name", "template"}
    chat_template.json: chat_template        of checkpoints with a processor

The first place with a template counts, as in transformers. A template of the configuration or of a load overrides all
of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from djinn_client.errors import InvalidRequest, ModelRejected
from djinn_client.files.model_files import MORE_TEMPLATES, ModelFiles
from djinn_client.protocol.requests import MAX_TEMPLATE

DEFAULT = "default"
WITH_TOOLS = "tool_use"
TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_FILE = "chat_template.json"
_NO_TEMPLATE = (
    "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): give one "
    "with chat_template= where the model is loaded or configured, or write the prompt yourself and use generate"
)


def chat_templates(files: ModelFiles, tokenizer_config: Mapping[str, Any], given: str = "") -> dict[str, str]:
    """Returns name → text; empty if the checkpoint has none. `given` replaces the checkpoint's templates. Raises
    ModelRejected for a file that is too large, or is no text."""
    if given:
        return {DEFAULT: given}
    found = {
        name.removeprefix(MORE_TEMPLATES).removesuffix(".jinja"): _text(files, name)
        for name in files
        if name.startswith(MORE_TEMPLATES)
    }
    if TEMPLATE_FILE in files:
        found[DEFAULT] = _text(files, TEMPLATE_FILE)
    if found:
        return found
    found = _named(tokenizer_config.get("chat_template"))
    return found or _named(_processor(files).get("chat_template"))


def read_template(path: str) -> str:
    """Reads a template file that the configuration names. Blocks. Raises ModelRejected."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE + 1)
    except (OSError, ValueError) as error:
        raise ModelRejected(f"chat_template: {path} cannot be read: {error}", file=path) from error
    if not text or len(text) > MAX_TEMPLATE:
        raise ModelRejected(f"chat_template: {path} must have from 1 to {MAX_TEMPLATE:,} characters", file=path)
    return text


def template_for(templates: Mapping[str, str], has_tools: bool) -> str:
    """Chooses the template for chats with or without tools. Raises InvalidRequest if there is none."""
    if has_tools and WITH_TOOLS in templates:
        return templates[WITH_TOOLS]
    if DEFAULT in templates:
        return templates[DEFAULT]
    told = f"the model has the chat templates {', '.join(map(repr, sorted(templates)))}, and none called {DEFAULT!r}"
    raise InvalidRequest(told if templates else _NO_TEMPLATE, field="chat")


def _named(value: object) -> dict[str, str]:
    """Reads templates by name from a text, a list of names and templates, or a mapping."""
    if isinstance(value, str):
        return {DEFAULT: value} if value else {}
    if isinstance(value, list):
        pairs = [(each.get("name"), each.get("template")) for each in value if isinstance(each, dict)]
    elif isinstance(value, dict):
        pairs = list(value.items())
    else:
        return {}
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _text(files: ModelFiles, name: str) -> str:
    try:
        return files.read(name, MAX_TEMPLATE).decode()
    except UnicodeDecodeError as error:
        raise ModelRejected(f"{files.folder}/{name} is no text: {error}", file=name) from error


def _processor(files: ModelFiles) -> dict[str, Any]:
    """Raises ModelRejected."""
    if PROCESSOR_FILE not in files:
        return {}
    try:
        content = json.loads(_text(files, PROCESSOR_FILE))
    except (ValueError, RecursionError) as error:
        raise ModelRejected(f"{files.folder}/{PROCESSOR_FILE} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
