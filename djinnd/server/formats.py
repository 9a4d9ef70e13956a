"""Formats of outputs: checked before anything runs, and what an engine needs to follow one.

A schema is a stranger's text, and compiling it may take all the time and memory there is, or end the process: it is
done in the principal's text worker, for configured models, too. What has been checked once is known by its hash.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from djinn_client.errors import InvalidRequest, NoTokenizer, TextFailed
from djinn_client.protocol import Generate, OutputFormat
from djinn_client.shm import new_window
from djinnd.messages import Grammar
from djinnd.server.texts import ModelText, Texts
from djinnd.text.grammar import grammar_text
from djinnd.text.vocabulary import TOKENIZER
from djinnd.text_jobs import CheckGrammar, GrammarChecked

_REMEMBERED = 1024  # formats of a model


@dataclass(frozen=True, slots=True)
class Guide:
    """What a run's output follows. `table`: a memfd of the model's tokens, where its tokenizer is a stranger's."""

    text: ModelText
    grammar: str
    table: int | None

    def message(self) -> tuple[Grammar, int]:
        """For an engine, with the descriptor that comes with it. Raises TextFailed where the model has been unloaded
        meanwhile."""
        if self.table is None and TOKENIZER not in self.text.files:
            raise TextFailed(f"{self.text.name} has been unloaded: load it again")
        fd = os.dup(self.text.files.descriptor(TOKENIZER) if self.table is None else self.table)
        return Grammar(self.grammar, self.text.number, self.table is not None, sorted(self.text.eos)), fd


class Formats:
    """Knows which formats of which models have been checked, and the tables of strangers' tokens."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._checked: weakref.WeakKeyDictionary[ModelText, OrderedDict[bytes, None]] = weakref.WeakKeyDictionary()
        self._tables: weakref.WeakKeyDictionary[ModelText, int] = weakref.WeakKeyDictionary()

    async def guide(self, text: ModelText, user: int, form: OutputFormat | None) -> Guide | None:
        """Raises GrammarRejected, InvalidRequest, NoTokenizer, TextFailed, QuotaExceeded."""
        if form is None:
            return None
        self._expect_possible(text, form)
        is_strangers = text.vocabulary is None
        checked, key = self._checked.setdefault(text, OrderedDict()), _hash(form)
        if key not in checked or (is_strangers and text not in self._tables):
            question = CheckGrammar(text.number, form, wants_table=is_strangers and text not in self._tables)
            answer = await self._texts.check(text, user, question)
            self._note(text, answer)
            checked[key] = None
        checked.move_to_end(key)
        if len(checked) > _REMEMBERED:
            checked.popitem(last=False)
        return Guide(text, grammar_text(form, forces=not is_strangers), self._tables.get(text))

    def _expect_possible(self, text: ModelText, form: OutputFormat) -> None:
        if text.lacking:
            raise NoTokenizer(f"{text.name} has no text that a format could be about, as {text.lacking}")
        limit = self._texts.limits.grammar_bytes
        if len(form.text) > limit or len(form.text.encode(errors="replace")) > limit:
            told = f"the format has {len(form.text):,} characters: at most {limit:,} bytes (limits.grammar_bytes)"
            raise InvalidRequest(told, field="format", limit=limit)

    def _note(self, text: ModelText, answer: GrammarChecked) -> None:
        if answer.table and text not in self._tables:
            table = new_window("djinn-tokens", len(answer.table))
            os.pwrite(table, answer.table, 0)
            self._tables[text] = table
            weakref.finalize(text, os.close, table)


def check_format(request: Generate, *, has_breakpoints: bool) -> None:
    """Raises InvalidRequest for what does not go together with a format."""
    if request.format is not None and (request.resume or has_breakpoints):
        raise InvalidRequest(
            "a call with a format cannot stop inside the model and go on: end the session's breakpoints, or leave the "
            "format out",
            field="format",
        )


def _hash(form: OutputFormat) -> bytes:
    digest = hashlib.blake2b(f"{form.kind} {form.strict} ".encode(), digest_size=16)
    digest.update(form.text.encode(errors="surrogatepass"))
    return digest.digest()
