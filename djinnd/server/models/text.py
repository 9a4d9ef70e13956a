"""The text side of one loaded model: its tokenizer, its chat template and its format of answers."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import Generate
from djinn_client.transport.shm import new_window
from djinnd.jobs.text import MAX_TEMPLATES, ModelOpened, opened
from djinnd.text.chat.answer import ChatAnswer
from djinnd.text.chat.reply import ChatReply
from djinnd.text.reader import ReadingRules, TextReader
from djinnd.text.replies.detection import AUTO, reply_format
from djinnd.text.replies.format import ReplyFormat
from djinnd.text.replies.tools import Tools
from djinnd.text.token_bytes import TokenBytes
from djinnd.text.vocabulary import TokensOnly, Vocabulary, lacking

_numbers = itertools.count(1)


class TokenizedPrompt(NamedTuple):
    """A prompt in tokens. `stop_tokens`: the special tokens among the stop strings. For a chat, `tail` is the end of
    its text, and `tools` are the tools that the answer may call."""

    tokens: list[int]
    stop_tokens: frozenset[int] = frozenset()
    tail: str = ""
    tools: Tools = MappingProxyType({})


class TokenMemory:
    """A memfd with the table of a model's tokens, for engines. It is closed with its model, or when nothing refers to
    it. `special`: the ids of the special tokens, by their texts."""

    def __init__(self, table: bytes, special: dict[str, int]) -> None:
        self.special = special
        self.fd = new_window("djinn-tokens", max(1, len(table)))
        os.pwrite(self.fd, table, 0)
        self.close = weakref.finalize(self, os.close, self.fd)  # closes it once, however often it is called


class ModelText:
    """The text side of one loaded model, until `close`.

    - `files`: the model's open files; the model closes them.
    - `vocabulary`: of a configured model. None if it has no tokenizer, and where only text workers read the files.
    - `template`: a chat template that replaces the checkpoint's.
    - `told`: the description of the files, from the vocabulary or from a text worker.
    - `tokens`: set when an engine first needs them, because it may not read the model's tokenizer.
    """

    def __init__(
        self,
        name: str,
        files: ModelFiles,
        vocabulary: Vocabulary | TokensOnly | None = None,
        template: str = "",
        configured_format: str = AUTO,
    ) -> None:
        self.number = next(_numbers)
        self.name = name
        self.files = files
        self.vocabulary = vocabulary if isinstance(vocabulary, Vocabulary) else None
        self.template = template
        self._configured_format = configured_format
        self.told = ModelOpened(False, []) if vocabulary is None else opened(vocabulary)
        self.tokens: TokenMemory | None = None
        self.is_closed = False

    def close(self) -> None:
        """Called when the model is unloaded. Calls that still run may hold this object."""
        self.is_closed = True
        if self.tokens is not None:
            self.tokens.close()

    @property
    def lacking(self) -> str:
        """Why the model takes no text; empty if it takes text."""
        return "" if self.told.has_text else lacking(self.files)

    @property
    def eos(self) -> frozenset[int]:
        """The tokens that end an output."""
        return frozenset(self.told.eos)

    @property
    def turn_ends(self) -> frozenset[int]:
        """The tokens that end an answer of a chat."""
        return frozenset(self.told.turn_ends)

    def reader(self, context: Sequence[int], rules: ReadingRules) -> TextReader | None:
        """A detokenizer for tokens that follow `context`; None if a text worker detokenises, or nothing does."""
        return None if self.vocabulary is None else self.vocabulary.reader(context, rules)

    @cached_property
    def reply_format(self) -> ReplyFormat:
        """How the model writes answers. For a model that is not configured it is used only to force calls: a text
        worker parses the answers, by the checkpoint's response template if it has one."""
        if self.vocabulary is not None:
            return self.vocabulary.reply_format(self._configured_format)
        return reply_format(self.told.templates[:MAX_TEMPLATES], {})

    def answer(self, request: Generate, prompt: TokenizedPrompt) -> ChatAnswer | None:
        """Reads the answer of a chat; None for other requests. Text workers read the answers of models that are not
        configured."""
        chat = request.chat
        if chat is None or self.is_read_by_workers:
            return None if chat is None else ChatAnswer()
        return ChatReply(self.reply_format, prompt.tail, prompt.tools, request.stop, parallel=chat.parallel_tools)

    @property
    def token_bytes(self) -> TokenBytes | None:
        """Maps tokens to their bytes; None if a text worker does that."""
        return None if self.vocabulary is None else self.vocabulary.token_bytes

    @property
    def is_read_by_workers(self) -> bool:
        return self.vocabulary is None and not self.lacking

    @property
    def notes(self) -> list[str]:
        """Notes for users of the model."""
        return [] if self.eos else ["the checkpoint names no end token (eos): outputs end by max_tokens or a stop"]
