"""What the server and a text worker say to each other, in the frames of djinn_client.protocol.

    server ──Open, with the open files──► worker ──Opened | Failed──► server
           ──Encode─────────────────────►        ──Encoded | TooMany | Failed──►
           ──EncodeChat─────────────────►        ──Encoded | TooMany | Failed──►
           ──Decode─────────────────────►        ──Decoded | Failed──►
           ──CheckGrammar───────────────►        ──GrammarChecked | Failed──►
           ──Begin, then Read as tokens come──►  ──for each Read: ReadText | Failed──►
           ──Name───────────────────────►        ──Named | Failed──►
           ──End, Forget──►

The worker's first word is Ready. It answers in the order in which it was asked. What it says later may be the work of
somebody who has taken it over, and is believed no more than what clients say.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from djinn_client.chat import ChatDelta, ChatInput
from djinn_client.protocol import decoded, framed
from djinnd.text.encoder import TextRules
from djinnd.text.vocabulary import Vocabulary

MAX_QUESTION = 256 << 20  # bytes: a request's text, which limits.request_bytes bounds
MAX_ANSWER = 8 << 20  # bytes: the tokens of a prompt, or the text of READ_TOKENS tokens
MAX_TEMPLATES = 64 << 10  # characters of chat templates that are looked at to find the format of answers
READ_TOKENS = 1024  # of one Read, at the most

# --- server to worker -----------------------------------------------------------------------------------------------


class Open(msgspec.Struct, tag="open"):
    """The files `files` of a model come with this; the worker closes them when it has read them."""

    model: int
    name: str  # for messages
    files: list[str]
    most: int  # bytes that tokenizer.json may have
    template: str = ""  # for chats, in the place of the checkpoint's


class Forget(msgspec.Struct, tag="forget"):
    """Readings of the model go on."""

    model: int


class Encode(msgspec.Struct, tag="encode"):
    """A request's prompt and stop strings. `text` None: the prompt came as tokens."""

    model: int
    text: str | None
    rules: TextRules
    most: int  # tokens that there is room for
    stops: list[str]
    skip_special: bool


class EncodeChat(msgspec.Struct, tag="encode_chat"):
    """A request's messages, and its stop strings."""

    model: int
    chat: ChatInput
    most: int  # tokens that there is room for
    stops: list[str]
    skip_special: bool


class Decode(msgspec.Struct, tag="decode"):
    """`spelled`: each token as the vocabulary has it, and not the text of all."""

    model: int
    tokens: list[int]
    spelled: bool = False


class CheckGrammar(msgspec.Struct, tag="check_grammar"):
    """Whether the grammar can be followed with the model's tokens. `wants_table`: the answer has them."""

    model: int
    grammar: str
    wants_table: bool


class ChatReading(msgspec.Struct):
    """An answer of a chat. `tail`: the end of the prompt's text; `tools`: the functions that the answer may call;
    `parallel` False: it ends with its first call."""

    tail: str
    tools: bytes
    stops: list[str]
    parallel: bool


class Begin(msgspec.Struct, tag="begin"):
    """A reading: the text of tokens that follow `context`. `chat`: the text is an answer, and the worker knows how its
    tokens become text. `stops`, `skip_special` and `least` are fields of ReadingRules."""

    reading: int
    model: int
    context: list[int]
    stops: list[str]
    skip_special: bool
    least: int = 0
    chat: ChatReading | None = None


class Read(msgspec.Struct, tag="read"):
    reading: int
    tokens: list[int]
    last: bool  # no more follow, and the reading ends
    named: list[int] = []  # tokens whose bytes are wanted


class Name(msgspec.Struct, tag="name"):
    """What do these tokens stand for? 32 bits each, little-endian; each may be there many times."""

    model: int
    tokens: bytes


class End(msgspec.Struct, tag="end"):
    """The reading ends, and nobody wants the rest of it."""

    reading: int


# --- worker to server -----------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag="ready"):
    """`lacking`: what this machine lacks of the sandbox, which is closed as far as it goes; "": nothing."""

    lacking: str = ""


class Opened(msgspec.Struct, tag="opened"):
    has_text: bool
    eos: list[int]
    turn_ends: list[int] = []  # tokens that end an answer of a chat
    bos_token: str = ""
    eos_token: str = ""
    has_chat: bool = False
    template: str = ""  # of chats without tools
    templates: str = ""  # the texts of all


class Encoded(msgspec.Struct, tag="encoded"):
    tokens: list[int]
    stop_tokens: list[int]  # special tokens among the stop strings
    tail: str = ""  # of a chat: the end of its text


class Decoded(msgspec.Struct, tag="decoded"):
    """One text, or one of each token."""

    texts: list[str]


class TooMany(msgspec.Struct, tag="too_many"):
    """`tokens` are more than there is room for."""

    tokens: int


class GrammarChecked(msgspec.Struct, tag="grammar_checked"):
    """It can. `table`: what the tokens stand for, as msgpack of djinnd.text.grammar.TokenTable."""

    table: bytes = b""


class ReadText(msgspec.Struct, tag="read_text"):
    """`text`: of an answer of a chat, its content; `delta` is what it says beside that. `stopped_after`: how many
    tokens of this Read there are up to the one that ended the output; the reading has ended then. `stopped_by`: the
    stop string that is complete."""

    text: str
    stopped_after: int | None = None
    token_bytes: dict[int, bytes] = {}
    delta: ChatDelta | None = None
    stopped_by: str = ""

    @property
    def characters(self) -> int:
        """Of all that it says."""
        if self.delta is None:
            return len(self.text)
        calls = sum(1 + len(call.id) + len(call.name) + len(call.arguments) for call in self.delta.tool_calls)
        return len(self.text) + len(self.delta.reasoning) + calls


class Named(msgspec.Struct, tag="named"):
    token_bytes: dict[int, bytes]


class Failed(msgspec.Struct, tag="failed"):
    """The worker goes on."""

    code: Literal["model_rejected", "text_failed", "invalid_request", "grammar_rejected"]
    message: str


def opened(vocabulary: Vocabulary) -> Opened:
    """What the server wants to know of it."""
    if not vocabulary.has_text:
        return Opened(has_text=False, eos=sorted(vocabulary.eos))
    assert vocabulary.chats is not None
    bos, eos = vocabulary.named
    ends, template = sorted(vocabulary.turn_ends), vocabulary.chats.default
    joined = vocabulary.chats.joined[:MAX_TEMPLATES]
    return Opened(True, sorted(vocabulary.eos), ends, bos, eos, vocabulary.has_chat, template, joined)


ToWorker = Open | Forget | Encode | EncodeChat | CheckGrammar | Decode | Begin | Read | End | Name
Answer = Opened | Encoded | TooMany | GrammarChecked | Decoded | ReadText | Named | Failed
FromWorker = Ready | Answer

_encode = msgspec.msgpack.Encoder().encode
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker, fds: int = 0) -> bytes:
    return framed(_encode(message), fds)


def decode_to_worker(payload: bytes) -> ToWorker:
    return decoded(_to_worker, payload)


def decode_from_worker(payload: bytes) -> FromWorker:
    """Raises ProtocolError."""
    return decoded(_from_worker, payload)
