"""Decodes one run's tokens in a text worker, while the engine goes on.

    token … token ──► Read ──► worker ──► ReadText ──► piece     one Read at a time: tokens that come meanwhile
                                                                 are the next one's
    Finished ──► Read(last) ──► ReadText ──► the final reply

A run whose worker falls behind by more than MOST_BEHIND tokens is held, so that the engine never outruns the text
without bound. A slow tokenizer only slows the runs of its own tenant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from djinn_client.errors import DjinnError, TextFailed
from djinnd.jobs.text import READ_TOKENS, BeginReading, ChatReading, EndReading, ReadText, ReadTokens
from djinnd.server.text.generation import Generation
from djinnd.server.text.text_worker import TextWorker
from djinnd.text.reader import ReadingRules, expect_bounded

MOST_BEHIND = 1024  # tokens

_numbers = itertools.count(1)  # of readings


class TextReceiver(Protocol):
    """The run that gets the text."""

    def text_came(self, read: ReadText) -> None: ...
    def text_failed(self, error: DjinnError) -> None: ...
    def text_behind(self, is_behind: bool) -> None: ...


class WorkerReading:
    """Reads one run's text in a worker, from the run's start to its last text, or until `end`."""

    def __init__(
        self,
        worker: TextWorker,
        model: int,
        context: Sequence[int],
        rules: ReadingRules,
        chat: ChatReading | None,
        reader: TextReceiver,
    ) -> None:
        """`chat`: the text is the answer of a chat, which the worker reads."""
        self._number = next(_numbers)
        self._worker = worker
        self._reader: TextReceiver | None = reader  # None: it is over. The reader keeps this reading
        self._is_asked = False
        self._asked = 0  # tokens of the last Read
        self._is_over = False
        self._is_behind = False
        self._then: Callable[[], None] | None = None  # when all has been read
        self._tokens = self._characters = 0  # so far
        worker.readings += 1
        worker.tell(BeginReading(self._number, model, list(context), rules, chat))

    def go_on(self, generation: Generation) -> None:
        """Asks for the next text: tokens came, or a Read was answered."""
        if self._is_over:
            return
        if not self._is_asked and (generation.is_due or self._then is not None):
            self._ask(generation)
        self._note_behind(generation.unread > MOST_BEHIND)

    def finish(self, generation: Generation, then: Callable[[], None]) -> None:
        """Notes that no more tokens come. Calls `then` when the text of all has been read, or cannot be."""
        if self._is_over:
            then()
            return
        self._then = then
        self.go_on(generation)

    def end(self) -> None:
        """Ends the reading early."""
        if not self._is_over:
            self._is_over = True
            self._worker.readings -= 1
            self._worker.tell(EndReading(self._number))
        self._reader = None

    def _ask(self, generation: Generation) -> None:
        tokens = generation.take_unread(READ_TOKENS)
        is_last = self._then is not None and not generation.unread
        self._is_asked, self._asked = True, len(tokens)
        self._tokens += len(tokens)
        question = ReadTokens(self._number, tokens, is_last, generation.unnamed())
        self._worker.ask(question, lambda answer: self._answered(generation, question, answer))

    def _answered(self, generation: Generation, question: ReadTokens, answer: ReadText | DjinnError) -> None:
        self._is_asked = False
        reader = self._reader
        if reader is None:
            return
        try:
            read = self._expect_text(answer, question)
            generation.name({token: read.token_bytes.get(token, b"") for token in question.named})
        except DjinnError as error:
            self._finished()
            reader.text_failed(error)
        else:
            if question.last or read.stopped_after is not None:
                self._finished()
            reader.text_came(read)
        if self._is_over and (then := self._then) is not None:
            self._then = None
            then()
        else:
            self.go_on(generation)

    def _expect_text(self, answer: ReadText | DjinnError, question: ReadTokens) -> ReadText:
        """Checks the worker's answer. Raises the worker's error, or TextFailed for more text than an honest worker
        sends."""
        if isinstance(answer, DjinnError):
            raise answer
        if answer.stopped_after is not None and not 0 <= answer.stopped_after <= self._asked:
            raise TextFailed("the text worker has counted tokens that it was not asked for")
        self._characters += answer.characters
        expect_bounded(self._characters, self._tokens)
        expect_bounded(sum(map(len, answer.token_bytes.values())), len(question.named))
        return answer

    def _finished(self) -> None:
        self._note_behind(False)
        self.end()

    def _note_behind(self, is_behind: bool) -> None:
        if is_behind != self._is_behind:
            self._is_behind = is_behind
            if self._reader is not None:
                self._reader.text_behind(is_behind)
