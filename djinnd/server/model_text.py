"""The text side of one loaded model, and a prompt that it has made."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from djinn_client.model_files import ModelFiles
from djinn_client.protocol import Generate
from djinnd.text.chat.answer import ChatAnswer
from djinnd.text.chat.reply import ChatReply
from djinnd.text.reader import ReadingRules, TextReader
from djinnd.text.replies import ReplyFormat, Tools, reply_format
from djinnd.text.replies.detection import AUTO
from djinnd.text.token_bytes import TokenBytes
from djinnd.text.vocabulary import Vocabulary, lacking
from djinnd.text_jobs import MAX_TEMPLATES, Opened, opened

_numbers = itertools.count(1)


class Prompt(NamedTuple):
    """`stop_tokens`: special tokens among the stop strings. Of a chat, `tail`: the end of its text; `tools`: what the
    answer may call."""

    tokens: list[int]
    stop_tokens: frozenset[int] = frozenset()
    tail: str = ""
    tools: Tools = MappingProxyType({})


class ModelText:
    """The text side of one loaded model. `vocabulary`: of a configured model; None: its files are only ever read by
    text workers. `files`: the model's, which closes them. `template`: for chats, in the place of the checkpoint's.
    `told`: what a text worker, or the vocabulary, has said of the files."""

    def __init__(
        self,
        name: str,
        files: ModelFiles,
        vocabulary: Vocabulary | None = None,
        template: str = "",
        configured_format: str = AUTO,
    ) -> None:
        self.number = next(_numbers)
        self.name = name
        self.files = files
        self.vocabulary = vocabulary
        self.template = template
        self._configured_format = configured_format
        self.told = Opened(False, []) if vocabulary is None else opened(vocabulary)

    @property
    def lacking(self) -> str:
        """Why it takes no text; "" where it takes some."""
        return "" if self.told.has_text else lacking(self.files)

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end an output."""
        return frozenset(self.told.eos)

    @property
    def turn_ends(self) -> frozenset[int]:
        """Tokens that end an answer of a chat."""
        return frozenset(self.told.turn_ends)

    def reader(self, context: Sequence[int], rules: ReadingRules) -> TextReader | None:
        """Of tokens that follow `context`; None where a text worker reads them, or nobody does."""
        return None if self.vocabulary is None else self.vocabulary.reader(context, *rules)

    @cached_property
    def reply_format(self) -> ReplyFormat:
        """How the model writes answers. Here it says how calls are forced; for a model that is not configured, a text
        worker reads the answers, by the checkpoint's response template where there is one."""
        if self.vocabulary is not None:
            return self.vocabulary.reply_format(self._configured_format)
        return reply_format(self.told.templates[:MAX_TEMPLATES], {})

    def answer(self, request: Generate, prompt: Prompt) -> ChatAnswer | None:
        """Of a chat; None for other requests. A text worker reads the answers of models that are not configured."""
        chat = request.chat
        if chat is None or self.is_read_by_workers:
            return None if chat is None else ChatAnswer()
        return ChatReply(self.reply_format, prompt.tail, prompt.tools, request.stop, parallel=chat.parallel_tools)

    @property
    def token_bytes(self) -> TokenBytes | None:
        """What names tokens in the server; None where a text worker does."""
        return None if self.vocabulary is None or self.lacking else self.vocabulary.token_bytes

    @property
    def is_read_by_workers(self) -> bool:
        return self.vocabulary is None and not self.lacking

    @property
    def notes(self) -> list[str]:
        """What somebody who uses the model should know."""
        return [] if self.eos else ["the checkpoint names no end token (eos): outputs end by max_tokens or a stop"]
