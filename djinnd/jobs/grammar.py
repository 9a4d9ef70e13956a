"""Messages between an engine and a grammar process, in the frames of djinn_client.protocol.

    engine ──Begin──────────────► process ──States, with the first mask──► engine
           ──Advance, once a step──►      ──States─────────────────────────►
           ──Try, for guesses──────►      ──States, with counts of masks───►
           ──End─────────────────►

The masks are in memory that both processes have mapped. A run has a slot with a bit for each token, which is 1 if the
token may come next. The grammar process writes a slot before it sends the state; the engine reads it until it sends the
next message about that run. A Try lends the run further slots, for the masks behind the tokens of a guess. The process
handles messages in order, so a slot may be lent again when the step of the guess is over.
"""

from __future__ import annotations

from functools import partial

import msgspec

from djinn_client.protocol import decoded, framed

MAX_FRAME = 64 << 20  # bytes; the largest message has a grammar and the tokens of an output that continues
SLOTS = 4096  # most runs of one process at a time
WORD = 32  # tokens in one word of a mask
_LINE = 16  # words in a cache line


def words_of(vocab: int) -> int:
    """Words in a slot. A slot is a multiple of 64 bytes, so that no two threads write to the same cache line."""
    return _LINE * -(-vocab // (_LINE * WORD))


# --- engine to process ------------------------------------------------------------------------------------------------


class BeginGrammar(msgspec.Struct, tag="begin", array_like=True):
    """Begins a run whose output must match the grammar and has `tokens` already."""

    run: int
    slot: int
    grammar: str
    tokens: list[int]


class AdvanceGrammars(msgspec.Struct, tag="advance", array_like=True):
    """The next tokens of each run: one, and as many more as guesses were right. Tokens that a state has listed as
    `forced` are not sent."""

    tokens: list[tuple[int, list[int]]]  # (run, tokens)


class TryTokens(msgspec.Struct, tag="try", array_like=True):
    """Asks for the masks behind each token of a guess, as if the run's output went on with it."""

    step: int  # the answer has it, too
    guesses: list[tuple[int, list[int], list[int]]]  # (run, tokens, a slot for each)


class EndGrammar(msgspec.Struct, tag="end", array_like=True):
    """Ends a run and frees its slot."""

    run: int


# --- process to engine ------------------------------------------------------------------------------------------------


class GrammarState(msgspec.Struct, array_like=True):
    """The state of a run, after its mask has been written."""

    run: int
    forced: list[int] = []  # the only possible next tokens; the mask is for the token after them
    ended: bool = False  # the output is complete after the forced tokens
    error: str = ""  # why the run cannot continue; the run has ended


class GrammarStates(msgspec.Struct, tag="states", array_like=True):
    """The states of several runs. Most runs are in `plain`, which the engine reads quickly between two steps."""

    plain: list[int] = []  # runs with a new mask, without forced tokens, end or error
    others: list[GrammarState] = []
    step: int = 0  # of the Try that this answers
    tried: list[tuple[int, int]] = []  # (run, how many first tokens of its guess have a mask behind them)


ToProcess = BeginGrammar | AdvanceGrammars | TryTokens | EndGrammar

_encode = msgspec.msgpack.Encoder().encode


def encode(message: ToProcess | GrammarStates) -> bytes:
    return framed(_encode(message), 0)


# These raise ProtocolError for a message that is not of the protocol.
decode_to_process = partial(decoded, msgspec.msgpack.Decoder[ToProcess](ToProcess))
decode_to_engine = partial(decoded, msgspec.msgpack.Decoder[GrammarStates](GrammarStates))
