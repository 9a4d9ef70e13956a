"""The loop of a text worker: each question is answered before the next one is read.

The tokenizer library is Rust. A tokenizer that takes too much memory aborts the process, and the server tells its
caller why; one that panics raises a BaseException, which is answered here, and the process goes on.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from djinn_client.errors import GrammarRejected, InvalidRequest, ModelRejected, TextFailed
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import OutputFormat
from djinn_client.protocol.fields.chat import ChatInput
from djinnd.confinement.channel import ConfinedChannel
from djinnd.jobs.text import (
    MAX_ANSWER,
    BeginReading,
    CheckGrammar,
    Decode,
    Decoded,
    Encode,
    Encoded,
    EndReading,
    ForgetModel,
    FromWorker,
    GrammarChecked,
    OpenModel,
    QuestionFailed,
    ReadText,
    ReadTokens,
    SpellTokens,
    TokensSpelled,
    TooMany,
    ToWorker,
    opened,
)
from djinnd.text.chat.rendering import AddedTokens, ChatTemplates
from djinnd.text.chat.reply import ChatReply
from djinnd.text.encoder import TextRules
from djinnd.text.grammar import compiled, expect_sound, grammar_text, table_of
from djinnd.text.reader import ReadingRules, expect_bounded
from djinnd.text.replies.detection import reply_format
from djinnd.text.vocabulary import Vocabulary
from djinnd.text_worker.reading import Reading

_MOST_TOLD = 2000  # characters of an error
_MOST_TOKENS = MAX_ANSWER // 5 - 16  # of one answer: a token is five bytes at the most


class TextService:
    def __init__(self) -> None:
        self._vocabularies: dict[int, Vocabulary] = {}
        self._readings: dict[int, Reading] = {}

    def serve(self, channel: ConfinedChannel[ToWorker, Any]) -> None:
        """Answers questions until the server hangs up."""
        for message, fds in channel.messages():
            answer = self.answer(message, fds)
            if answer is not None:
                channel.send(answer)

    def answer(self, message: ToWorker, fds: list[int]) -> FromWorker | None:
        """Answers one message; None if it needs no answer."""
        try:
            return self._answer(message, fds)
        except (GrammarRejected, ModelRejected, TextFailed) as error:
            return QuestionFailed(error.code, error.message[:_MOST_TOLD])  # type: ignore[arg-type]
        except InvalidRequest as error:
            return QuestionFailed("invalid_request", error.message[:_MOST_TOLD])
        except BaseException as error:  # a panic in Rust code is no Exception
            return QuestionFailed("text_failed", f"the tokenizer failed: {type(error).__name__}: {error}"[:_MOST_TOLD])

    def _answer(self, message: ToWorker, fds: list[int]) -> FromWorker | None:
        match message:
            case OpenModel():
                with ModelFiles.handed_over(message.name, message.files, fds) as files:
                    vocabulary = Vocabulary.read(message.name, files, message.most, message.template)
                if isinstance(vocabulary, Vocabulary):
                    vocabulary.remember_chats()
                    self._vocabularies[message.model] = vocabulary
                return opened(vocabulary)
            case Encode():
                return _encoded(self._vocabulary(message.model), message)
            case Decode():
                return _decoded(self._vocabulary(message.model), message)
            case CheckGrammar():
                return _checked(self._vocabulary(message.model), message)
            case ReadTokens():
                return self._read(message)
            case SpellTokens():
                tokens = {*memoryview(message.tokens).cast("i")}
                return TokensSpelled(self._vocabulary(message.model).token_bytes.of(tokens))
            case BeginReading():
                self._begin(message)
            case EndReading():
                self._readings.pop(message.reading, None)
            case ForgetModel():
                self._vocabularies.pop(message.model, None)
        return None

    def _begin(self, message: BeginReading) -> None:
        """Begins a reading. After a failure the first Read finds no reading, and says so."""
        with suppress(BaseException):
            self._readings[message.reading] = Reading(self._vocabulary(message.model), message)

    def _read(self, message: ReadTokens) -> ReadText:
        reading = self._readings.pop(message.reading, None)
        if reading is None:
            raise TextFailed("the tokenizer failed on the tokens before the call's")
        answer = reading.read(message)
        if not reading.is_over:
            self._readings[message.reading] = reading
        return answer

    def _vocabulary(self, model: int) -> Vocabulary:
        if model not in self._vocabularies:
            raise TextFailed("the worker has forgotten the model's tokenizer: try again")
        return self._vocabularies[model]


def _encoded(vocabulary: Vocabulary, message: Encode) -> Encoded | TooMany:
    tokens: list[int] = []
    tail = ""
    if isinstance(message.prompt, ChatInput):
        tokens, tail = vocabulary.encode_chat(message.prompt)
    elif message.prompt is not None:
        tokens = vocabulary.encode(message.prompt, message.rules)
    if len(tokens) > min(message.most, _MOST_TOKENS):
        return TooMany(len(tokens))
    return Encoded(tokens, sorted(vocabulary.stop_tokens(message.stops, message.skip_special)), tail)


def _decoded(vocabulary: Vocabulary, message: Decode) -> Decoded:
    """Decodes tokens. Raises TextFailed for more text than a sound tokenizer makes."""
    texts = vocabulary.texts(message.tokens, message.spelled)
    expect_bounded(sum(map(len, texts)), len(message.tokens))
    return Decoded(texts)


def _checked(vocabulary: Vocabulary, message: CheckGrammar) -> GrammarChecked:
    """Compiles a grammar and asks it for the first mask: most of a grammar's work is done by then."""
    tokenizer = vocabulary.grammar_tokenizer
    matcher = compiled(message.grammar, tokenizer)
    matcher.compute_bitmask()
    expect_sound(matcher)
    return GrammarChecked(msgspec.msgpack.encode(table_of(tokenizer)) if message.wants_table else b"")


def rehearse() -> None:
    """Runs everything once before the sandbox is closed, because libraries import modules and query the machine at
    first use."""
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary(Tokenizer.from_str(tokenizer.to_str()), frozenset())
    tokens = vocabulary.encode("text", TextRules(starts=True))
    reader = vocabulary.reader([], ReadingRules(["stop"]))
    reader.read(tokens)
    reader.finish()
    vocabulary.token_bytes.of(tokens)
    compiled(grammar_text(OutputFormat("json_object")), vocabulary.grammar_tokenizer).compute_bitmask()
    _rehearse_chat()


def _rehearse_chat() -> None:
    """Renders a template with a loop, a filter, the clock, and an error, because jinja2 loads what it needs for the
    traceback of an error. Then parses an answer that calls a function."""
    text = (
        "{% for m in messages %}{{ m.content | tojson }}{{ strftime_now('%Y') }}{% endfor %}{{ raise_exception('no') }}"
    )
    chats = ChatTemplates({"default": text}, {}, AddedTokens(frozenset({"<|end|>"}), frozenset()))
    with suppress(InvalidRequest):
        chats.spans(ChatInput(b'[{"role": "user", "content": "<|end|>"}]'))
    answer = ChatReply(reply_format("<think></think><tool_call>", {}), "", {"f": {}}, ["stop"])
    answer.feed('<think>1</think>2<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    answer.finish()
