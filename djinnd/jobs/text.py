"""Messages between the server and a text worker, in the frames of djinn_client.protocol.

    server ──a Question──────────────────────────────► worker ──its answer | QuestionFailed──► server
           ──BeginReading, EndReading, ForgetModel──►

The first message of the worker is WorkerReady. It answers in the order of the questions. A malicious file may have
taken the worker over, so the server trusts its messages no more than messages of clients.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

from djinn_client.protocol import decoded, framed, union_of
from djinn_client.protocol.fields.chat import ChatDelta, ChatInput
from djinnd.text.encoder import TextRules
from djinnd.text.reader import ReadingRules
from djinnd.text.vocabulary import TokensOnly, Vocabulary

MAX_QUESTION = 256 << 20  # bytes; a request's text is bounded by limits.request_bytes
MAX_ANSWER = 8 << 20  # bytes; the largest have the tokens of a prompt, or the text of READ_TOKENS tokens
MAX_TEMPLATES = 64 << 10  # characters of chat templates that are searched for the format of answers
READ_TOKENS = 1024  # most tokens of one ReadTokens

Answer = TypeVar("Answer")


class ToWorker(msgspec.Struct):
    """A message to the worker: a question, or one without an answer."""


class Question(ToWorker, Generic[Answer]):
    """A message that the worker answers with an `Answer`, or with QuestionFailed."""

    @property
    def answers(self) -> Any:
        """`Answer`: the type of an answer, or the union of several."""
        return get_args(type(self).__orig_bases__[0])[0]  # type: ignore[attr-defined]


class FromWorker(msgspec.Struct):
    """A message from the worker."""


# --- worker to server -----------------------------------------------------------------------------------------------


class WorkerReady(FromWorker, tag="ready"):
    """The worker has confined itself as far as the machine permits."""

    lacking: str = ""  # the feature of the sandbox that this machine lacks; "" if none


class ModelOpened(FromWorker, tag="opened"):
    """The model's vocabulary and chat templates."""

    has_text: bool  # False: the model has no tokenizer
    eos: list[int]
    turn_ends: list[int] = []  # tokens that end an answer of a chat
    bos_token: str = ""
    eos_token: str = ""
    has_chat: bool = False
    template: str = ""  # template of chats without tools
    templates: str = ""  # all templates, up to MAX_TEMPLATES characters
    config: bytes = b""  # the file as it is; empty if it is large, like the next
    generation_config: bytes = b""


class Encoded(FromWorker, tag="encoded"):
    """The tokens of a prompt."""

    tokens: list[int]
    stop_tokens: list[int]  # special tokens among the stop strings
    tail: str = ""  # end of a chat's text


class Decoded(FromWorker, tag="decoded"):
    """One text, or one for each token."""

    texts: list[str]


class TooMany(FromWorker, tag="too_many"):
    """The prompt has `tokens` tokens, which are too many."""

    tokens: int


class GrammarChecked(FromWorker, tag="grammar_checked"):
    """The model's tokens can produce the grammar."""

    table: bytes = b""  # djinnd.text.grammar.TokenTable as msgpack, if it was asked for


class ReadText(FromWorker, tag="read_text"):
    """The text of the tokens of a ReadTokens."""

    text: str  # for an answer of a chat: its content
    stopped_after: int | None = None  # tokens of the question up to the one that ended the output, and the reading
    token_bytes: dict[int, bytes] = {}
    delta: ChatDelta | None = None  # reasoning and tool calls of an answer of a chat
    stopped_by: str = ""  # the stop string that ended the output

    @property
    def characters(self) -> int:
        """Number of characters in text, reasoning and tool calls."""
        if self.delta is None:
            return len(self.text)
        calls = sum(1 + len(call.id) + len(call.name) + len(call.arguments) for call in self.delta.tool_calls)
        return len(self.text) + len(self.delta.reasoning) + calls


class TokensSpelled(FromWorker, tag="named"):
    """The bytes of each token."""

    token_bytes: dict[int, bytes]


class QuestionFailed(FromWorker, tag="failed"):
    """The question failed. The worker goes on."""

    code: Literal["model_rejected", "text_failed", "invalid_request", "grammar_rejected"]
    message: str


# --- server to worker -----------------------------------------------------------------------------------------------


class OpenModel(Question[ModelOpened], tag="open"):
    """Opens a model. Descriptors of its files come with this message; the worker reads and closes them."""

    model: int
    name: str  # for error messages
    files: list[str]  # names, in the order of the descriptors
    most: int  # most bytes of tokenizer.json
    template: str = ""  # chat template that replaces the checkpoint's


class ForgetModel(ToWorker, tag="forget"):
    """Drops a model. Its readings go on."""

    model: int


class Encode(Question[Encoded | TooMany], tag="encode"):
    """Encodes a request's prompt and stop strings."""

    model: int
    prompt: str | ChatInput | None  # None: the prompt came as tokens
    most: int  # most tokens of the prompt
    stops: list[str]
    skip_special: bool = False
    rules: TextRules = TextRules(starts=True)  # of a text


class Decode(Question[Decoded], tag="decode"):
    """Decodes tokens to one text or, if `spelled`, to the vocabulary's spelling of each token."""

    model: int
    tokens: list[int]
    spelled: bool = False


class CheckGrammar(Question[GrammarChecked], tag="check_grammar"):
    """Asks if the model's tokens can produce the grammar. `wants_table`: the answer includes the token table."""

    model: int
    grammar: str
    wants_table: bool


class ChatReading(msgspec.Struct):
    """How to read an answer of a chat."""

    tail: str  # end of the prompt's text
    tools: bytes  # the functions that the answer may call
    stops: list[str]
    parallel: bool  # False: the answer ends with its first call


class BeginReading(ToWorker, tag="begin"):
    """Begins a reading: the text of tokens that follow `context`. With `chat`, it is the answer of a chat."""

    reading: int
    model: int
    context: list[int]
    rules: ReadingRules
    chat: ChatReading | None = None


class ReadTokens(Question[ReadText], tag="read"):
    """Reads the next tokens."""

    reading: int
    tokens: list[int]
    last: bool  # these are the last tokens, and the reading ends
    named: list[int] = []  # tokens for which the answer has the bytes


class SpellTokens(Question[TokensSpelled], tag="name"):
    """Asks for the bytes of tokens."""

    model: int
    tokens: bytes  # 32 bits each, little-endian; a token may occur many times


class EndReading(ToWorker, tag="end"):
    """Ends a reading early."""

    reading: int


def opened(vocabulary: Vocabulary | TokensOnly) -> ModelOpened:
    """The answer to OpenModel for a vocabulary."""
    settings = vocabulary.settings._asdict()
    if isinstance(vocabulary, TokensOnly):
        return ModelOpened(has_text=False, eos=sorted(vocabulary.eos), **settings)
    chats = vocabulary.chats
    return ModelOpened(
        has_text=True,
        eos=sorted(vocabulary.eos),
        turn_ends=sorted(vocabulary.turn_ends),
        bos_token=vocabulary.bos_token,
        eos_token=vocabulary.eos_token,
        has_chat=bool(chats),
        template=chats.default,
        templates=chats.joined[:MAX_TEMPLATES],
        **settings,
    )


_encode = msgspec.msgpack.Encoder().encode


def encode(message: ToWorker | FromWorker, fds: int = 0) -> bytes:
    return framed(_encode(message), fds)


# These raise ProtocolError for a message that is not of the protocol.
decode_to_worker = partial(decoded, msgspec.msgpack.Decoder[ToWorker](union_of(ToWorker)))
decode_from_worker = partial(decoded, msgspec.msgpack.Decoder[FromWorker](union_of(FromWorker)))
