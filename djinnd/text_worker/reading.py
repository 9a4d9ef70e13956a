"""Decodes one run's tokens in a text worker, as the tokens come."""

from __future__ import annotations

from djinnd.jobs.text import BeginReading, ChatReading, ReadText, ReadTokens
from djinnd.text.chat.conversation import read_tools
from djinnd.text.chat.reply import ChatReply
from djinnd.text.vocabulary import Vocabulary


class Reading:
    """Reads the tokens of one run. The answer of a chat is also parsed for reasoning and tool calls."""

    def __init__(self, vocabulary: Vocabulary, begin: BeginReading) -> None:
        """Raises InvalidRequest."""
        self.is_over = False
        self._vocabulary = vocabulary
        self._reply = None if begin.chat is None else _reply(vocabulary, begin.chat)
        rules = begin.rules if self._reply is None else self._reply.rules
        self._reader = vocabulary.reader(begin.context, rules)
        self._least = begin.rules.least

    def read(self, message: ReadTokens) -> ReadText:
        """Raises TextFailed."""
        text, stopped_after = self._plain(message) if self._reply is None else self._answer(self._reply, message)
        self.is_over = message.last or stopped_after is not None
        named = self._vocabulary.token_bytes.of(message.named) if message.named else {}
        delta = None if self._reply is None else self._reply.take_delta()
        return ReadText(text, stopped_after, named, delta, (self._reply or self._reader).stopped_by)

    def _plain(self, message: ReadTokens) -> tuple[str, int | None]:
        """Returns the text, and the number of tokens up to the one that completed a stop string."""
        before = self._reader.tokens
        text = self._reader.read(message.tokens)
        if message.last:
            text += self._reader.finish()
        stopped_after = self._reader.stopped_after
        return text, None if stopped_after is None else max(0, stopped_after - before)

    def _answer(self, reply: ChatReply, message: ReadTokens) -> tuple[str, int | None]:
        """Returns the content, and the number of tokens up to the one that ended the answer. Tokens are read one by one
        if the answer may end at each."""
        tokens, content = message.tokens, list[str]()
        size = 1 if reply.may_end else max(1, len(tokens))
        for end in range(size, len(tokens) + size, size):
            text = self._reader.read(tokens[end - size : end])
            content.append(reply.feed(text, may_stop=self._reader.tokens > self._least))
            if reply.is_stopped:
                return "".join(content), min(end, len(tokens))
        if message.last:
            content += [reply.feed(self._reader.finish()), reply.finish()]
        return "".join(content), len(tokens) if reply.is_stopped else None


def _reply(vocabulary: Vocabulary, chat: ChatReading) -> ChatReply:
    tools = read_tools(chat.tools) if chat.tools else {}
    return ChatReply(vocabulary.reply_format(), chat.tail, tools, chat.stops, parallel=chat.parallel)
