"""Follows the grammars of runs: a token in, what may follow it out.

    Begin ──► compiled in a thread of its own, as that may take seconds ──► mask
    Advance ──► consumed ──► masks of all, in parallel ──► where only one text can follow: its tokens, the mask behind

The state of a run follows from its grammar and its tokens, and from nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from djinn_client.errors import GrammarRejected
from djinnd.confinement.channel import Channel
from djinnd.grammar_jobs import WORD, Advance, Begin, End, State, States, ToProcess
from djinnd.text.grammar import compiled, expect_sound

Masks = npt.NDArray[np.uint32]  # [runs, words]: a bit a token, 1 where it may follow


@dataclass(slots=True, eq=False)
class Run:
    number: int
    slot: int
    matcher: LLMatcher | None = None  # None: it is being compiled
    is_over: bool = False


class Serving:
    def __init__(
        self, tokenizer: LLTokenizer, vocab: int, masks: Masks, threads: int, channel: Channel[ToProcess, States]
    ) -> None:
        """`vocab`: of the model, which may have more tokens than the tokenizer, as padding, or fewer. `masks`: of all
        slots, shared with the engine."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._masks = masks
        self._channel = channel
        self._executor = LLExecutor(threads)
        self._words = -(-tokenizer.vocab_size // WORD)
        lacked = self._words - vocab // WORD if tokenizer.vocab_size > vocab else 0
        self._most_end_words = len(tokenizer.eos_tokens) + lacked  # a mask with tokens in more words has another one
        self._goes_on = _bits(set(range(min(tokenizer.vocab_size, vocab))) - {*tokenizer.eos_tokens}, self._words)
        self._runs: dict[int, Run] = {}
        self._compiling = ThreadPoolExecutor(1, "djinn-compile")
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Until the engine hangs up."""
        for message, _ in self._channel.messages():
            match message:
                case Begin():
                    run = self._runs[message.run] = Run(message.run, message.slot)
                    self._compiling.submit(self._begin, run, message)
                case Advance():
                    self._advance(message)
                case End():
                    self._runs.pop(message.run).is_over = True
        self._compiling.shutdown(cancel_futures=True)

    def _begin(self, run: Run, message: Begin) -> None:
        """In the thread. A run that is over by then is not worth the work."""
        if run.is_over:
            return
        try:
            matcher = compiled(message.grammar, self._tokenizer)
            if not matcher.consume_tokens(message.tokens):
                raise GrammarRejected(f"the output so far does not follow its grammar: {matcher.get_error()}")
            run.matcher = matcher
            states = self._look([run])
        except GrammarRejected as error:
            states = [State(run.number, error=error.message)]
        self._tell(states)

    def _advance(self, message: Advance) -> None:
        runs = [self._runs[number] for number, _ in message.tokens]
        self._executor.consume_token_par(
            [(_matcher(run), token) for run, (_, token) in zip(runs, message.tokens, strict=True)]
        )
        self._tell(self._look(runs))

    def _tell(self, states: list[State]) -> None:
        with self._sending:
            self._channel.send(States(states))

    # --- what may follow --------------------------------------------------------------------------------------------

    def _look(self, runs: Sequence[Run]) -> list[State]:
        """Brings each run's mask into its slot, behind the tokens that must come."""
        table = self._computed(runs)
        words: list[int] = (table != 0).sum(axis=1).tolist()  # that hold a token
        single = [index for index, count in enumerate(words) if count == 1]
        forced = {index: tokens for index in single if (tokens := _forced(_matcher(runs[index])))}
        if forced:
            table[[*forced]] = self._computed([runs[index] for index in forced])
        width = min(self._words, self._masks.shape[1])
        slots = [run.slot for run in runs]
        self._masks[slots, :width] = table[:, :width]
        self._masks[slots, width:] = 0
        return [
            self._state(run, forced.get(index, []), self._may_go_on(table[index])) for index, run in enumerate(runs)
        ]

    def _may_go_on(self, mask: Masks) -> bool:
        """With a token of the model's that is no end token."""
        return bool((mask & self._goes_on).any())

    def _state(self, run: Run, forced: list[int], goes_on: bool) -> State:
        matcher = _matcher(run)
        try:
            expect_sound(matcher)
            if max(forced, default=0) >= self._vocab or not (goes_on or matcher.is_accepting()):
                raise GrammarRejected("the format demands what no token of the model can say", field="format")
        except GrammarRejected as error:
            return State(run.number, error=error.message)
        return State(run.number, forced, ended=not goes_on)

    def _computed(self, runs: Sequence[Run]) -> Masks:
        """Of the tokenizer's tokens."""
        table = np.zeros((len(runs), self._words), np.uint32)
        nbytes = 4 * self._words
        if len(runs) == 1:
            _matcher(runs[0]).unsafe_compute_mask_ptr(table.ctypes.data, nbytes)
        else:
            jobs: list[Any] = [(_matcher(run), index) for index, run in enumerate(runs)]
            self._executor.unsafe_compute_mask_ptr(jobs, table.ctypes.data, nbytes, len(runs))
        return table


def _bits(tokens: Iterable[int], words: int) -> npt.NDArray[np.uint32]:
    is_there = np.zeros(words * WORD, bool)
    is_there[[*tokens]] = True
    return np.packbits(is_there, bitorder="little").view(np.uint32)


def _forced(matcher: LLMatcher) -> list[int]:
    """Tokens that must come next, which the matcher has consumed then."""
    tokens = matcher.compute_ff_tokens()
    if tokens:
        matcher.consume_tokens(tokens)
    return tokens


def _matcher(run: Run) -> LLMatcher:
    assert run.matcher is not None, "nobody has a token for a run that has no mask yet"
    return run.matcher
