"""The prompt of a chat: a conversation, rendered by a checkpoint's template, as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.chat import ChatInput
from djinnd.text.chat.control import ControlSpan, ControlStrings
from djinnd.text.chat.conversation import ChatConversation, TemplateFeatures, read_conversation
from djinnd.text.chat.environment import ENVIRONMENT
from djinnd.text.chat.templates import DEFAULT, template_for

MAX_RENDERED = 32 << 20  # characters of a prompt
MOST_TOLD = 1000  # characters of an error message
# Stands behind the last message when the answer goes on with it. It ends with a space, as in transformers: if the space
# is missing afterwards, the template cuts spaces.
_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


class AddedTokens(NamedTuple):
    special: frozenset[str]
    others: frozenset[str]


class Template:
    """A compiled template. Raises InvalidRequest if the text is no template."""

    def __init__(self, text: str, tokens: AddedTokens) -> None:
        try:
            self._compiled = ENVIRONMENT.from_string(text)
            literals = _literals(text)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise InvalidRequest(f"the chat template cannot be read: {error}"[:MOST_TOLD], field="chat") from error
        self.text = text
        self.features = TemplateFeatures.of(text)
        self.control = ControlStrings(tokens.special, [each for each in tokens.others if each in literals])

    def render(self, conversation: ChatConversation, variables: Mapping[str, Any], goes_on: bool) -> str:
        """Renders a conversation. Raises InvalidRequest for a text that is too long; any exception of the template
        passes through."""
        told = {"tools": conversation.tools, "documents": None, **variables, **conversation.arguments}
        told["add_generation_prompt"] = not goes_on
        parts, length = [], 0
        for part in self._compiled.generate(messages=conversation.messages, **told):
            length += len(part)
            if length > MAX_RENDERED:
                raise InvalidRequest(f"the chat has more than {MAX_RENDERED:,} characters", field="messages")
            parts.append(part)
        return "".join(parts)


class ChatTemplates:
    """The templates of one model. `variables`: special tokens by the names that templates use for them."""

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, Any], tokens: AddedTokens) -> None:
        self._texts = templates
        self._variables = variables
        self._tokens = tokens
        self._compiled: dict[str, Template] = {}

    def __bool__(self) -> bool:
        return bool(self._texts)

    @property
    def default(self) -> str:
        """The template's text for chats without tools; "" if there is none."""
        return self._texts.get(DEFAULT, "")

    @cached_property
    def joined(self) -> str:
        """The texts of all templates."""
        return "\n".join(self._texts.values())

    def compile(self) -> None:
        """Compiles all templates ahead of the first chat. Raises InvalidRequest."""
        for text in self._texts.values():
            self._of(text)

    def spans(self, chat: ChatInput) -> list[ControlSpan]:
        """Renders the chat. Raises InvalidRequest."""
        template = self._of(template_for(self._texts, has_tools=bool(chat.tools) and chat.tool_choice != "none"))
        try:
            try:
                return self._spans(template, chat)
            except TypeError:  # it puts the arguments of tool calls between other texts
                return self._spans(template, chat, text_arguments=True)
        except InvalidRequest:
            raise
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template: {error}"[:MOST_TOLD], field="chat") from error
        except Exception as error:  # of a program that its author wrote, on values that the caller wrote
            told = f"the chat template failed on these messages: {type(error).__name__}: {error}"
            raise InvalidRequest(told[:MOST_TOLD], field="chat") from error

    def _spans(self, template: Template, chat: ChatInput, text_arguments: bool = False) -> list[ControlSpan]:
        conversation = read_conversation(chat, template.features, text_arguments=text_arguments)
        marked = ChatConversation(*map(template.control.mark, conversation))
        for message in marked.messages:
            _keep_apart(message.get("content"), template.control)
        if chat.continue_final:
            _mark_end(marked.messages[-1])
        text = template.render(marked, self._variables, chat.continue_final)
        if chat.continue_final:
            text = _up_to_end(text)
        return list(template.control.spans(text))

    def _of(self, text: str) -> Template:
        if text not in self._compiled:
            self._compiled[text] = Template(text, self._tokens)
        return self._compiled[text]


def _literals(template: str) -> str:
    """The text that a template writes itself. A zero byte keeps the parts apart, so that no string is found across
    two of them."""
    tree = ENVIRONMENT.parse(template)
    texts = [each.data for each in tree.find_all(nodes.TemplateData)]
    texts += [each.value for each in tree.find_all(nodes.Const) if isinstance(each.value, str)]
    return "\0".join(texts)


def _keep_apart(content: Any, control: ControlStrings) -> None:
    """Keeps the parts of a marked content from making a control string together."""
    if isinstance(content, list) and len(content) > 1:
        for part, text in zip(content, control.keep_apart([part["text"] for part in content]), strict=True):
            part["text"] = text


def _mark_end(message: dict[str, Any]) -> None:
    """Raises InvalidRequest."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _HERE
    elif isinstance(content, list) and content:
        content[-1]["text"] += _HERE
    else:
        raise InvalidRequest("continue_final: the last message has no content to go on with", field="continue_final")


def _up_to_end(text: str) -> str:
    """Raises InvalidRequest."""
    at = text.rfind(_HERE.strip())
    if at < 0:
        told = "continue_final: the chat template leaves the end of the last message out, so that nothing can follow it"
        raise InvalidRequest(told, field="continue_final")
    kept = text[:at]
    return kept if text.startswith(_HERE, at) else kept.rstrip()


def special_variables(*files: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that a checkpoint's files name, as templates know them: bos_token, eos_token …. The
    first file that names a token decides."""
    found: dict[str, str] = {}
    for settings in files:
        named = {name: _token(value) for name, value in settings.items() if name.endswith("_token")}
        extra = settings.get("extra_special_tokens")
        if isinstance(extra, dict):
            named |= {name: _token(value) for name, value in extra.items() if isinstance(name, str)}
        found = {name: text for name, text in named.items() if text is not None} | found
    return found


def _token(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
