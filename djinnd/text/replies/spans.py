"""The most common format: reasoning between two markers, then content, then calls that a marker begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from djinnd.text.replies.format import CallSyntax, ReplyFormat, TextSpan, cannot_force, tokens_in
from djinnd.text.replies.grammar import Maybe, Pieces, Space, Until, lark
from djinnd.text.replies.output import ReplyEvents
from djinnd.text.replies.source import MAX_SPACE, Malformed, Reading, Source, markers
from djinnd.text.replies.tools import Tools

_TAIL = 1024  # characters of a prompt that can hold what opened the reasoning


@dataclass(frozen=True)
class SpanFormat(ReplyFormat):
    name: str
    reasoning: TextSpan | None = None
    calls: CallSyntax | None = None
    nine_character_ids: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        spans = (self.reasoning.begin, self.reasoning.end) if self.reasoning else ()
        return tokens_in(*spans, *(self.calls.markers() if self.calls else ()))

    @property
    def has_unmarked_calls(self) -> bool:
        return self.calls is not None and bool(self.calls.starts)

    def begins_reasoning(self, prompt: str) -> bool:
        """True if a prompt that ends like this has opened reasoning already."""
        return self.reasoning is not None and prompt[-_TAIL:].rstrip().endswith(self.reasoning.begin.rstrip())

    def read(self, prompt: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        if (yield from self._reasoning_starts(prompt, source)):
            yield from self._read_reasoning(source, output)
        if tools and (yield from self._call_starts(source)):
            yield from self._read_calls("", source, output, tools)
        calls = self.calls.begins if self.calls is not None and tools else ()
        while found := (yield from source.until(markers(*calls), output.content, trim=True)):
            yield from self._read_calls(found, source, output, tools)

    def _reasoning_starts(self, prompt: str, source: Source) -> Reading[bool]:
        """Reasoning begins a reply. Its marker is text anywhere else."""
        if self.reasoning is None or self.begins_reasoning(prompt):
            return self.reasoning is not None
        yield from source.space(MAX_SPACE)
        if (yield from source.comes(self.reasoning.begin)):
            return True
        source.back()
        return False

    def _read_reasoning(self, source: Source, output: ReplyEvents) -> Reading[None]:
        assert self.reasoning is not None
        source.told()
        yield from source.drop_space()
        yield from source.until(markers(self.reasoning.end), output.reasoning, trim=True)
        source.told()
        yield from source.drop_space()

    def _call_starts(self, source: Source) -> Reading[bool]:
        """True if the reply begins with a call that no marker announces."""
        starts = self.calls.starts if self.calls is not None else ()
        if not starts:
            return False
        yield from source.space(MAX_SPACE)
        if (yield from source.peek()) in starts:
            return True
        source.back()
        return False

    def _read_calls(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        assert self.calls is not None
        try:
            yield from self.calls.read(begin, source, output, tools)
        except Malformed:
            output.give_up()
            return
        source.told()
        yield from source.drop_space()

    def call_grammar(self, tools: Tools, parallel: bool, prompt: str, special: Mapping[str, int]) -> str:
        if self.calls is None:
            raise cannot_force(self.name)
        calls = [self.calls.forced(name, parameters) for name, parameters in tools.items()]
        return lark(self.before_content(prompt), calls, self.calls.between(), parallel, special)

    def before_content(self, prompt: str) -> Pieces:
        if self.reasoning is None:
            return ()
        think: Pieces = (Until(self.reasoning.end), Space())
        return think if self.begins_reasoning(prompt) else (Maybe((self.reasoning.begin, *think)),)
