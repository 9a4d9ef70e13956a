"""Follows the grammars of runs: takes each token, and computes the mask of the tokens that may follow.

    Begin ──► compiled in a thread of its own, as that may take seconds ──► mask
    Advance ──► consumed ──► masks of all, in parallel, where the engine reads them
                                 └──► where only one text can follow: its tokens, and the mask behind them
    Try ──► tokens of guesses, one after another: consumed ──► masks of all ──► all taken back

The state of a run depends only on its grammar and its tokens, not on guesses.
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
from djinnd.confinement.channel import ConfinedChannel
from djinnd.jobs.grammar import (
    WORD,
    AdvanceGrammars,
    BeginGrammar,
    EndGrammar,
    GrammarState,
    GrammarStates,
    ToProcess,
    TryTokens,
)
from djinnd.text.grammar import compiled, expect_sound

Masks = npt.NDArray[np.uint32]  # [runs, words]: a bit a token, 1 where it may follow


@dataclass(slots=True, eq=False)
class GrammarRun:
    """A run, the slot of its mask, and the matcher of its grammar."""

    number: int
    slot: int
    matcher: LLMatcher | None = None  # None: it is being compiled
    is_over: bool = False
    has_begun: bool = False  # its first mask is there; until then, the compiling thread uses the matcher
    is_forced: bool = False  # the matcher is ahead of the output by forced tokens


class GrammarService:
    def __init__(
        self,
        tokenizer: LLTokenizer,
        vocab: int,
        masks: Masks,
        threads: int,
        channel: ConfinedChannel[ToProcess, GrammarStates],
    ) -> None:
        """vocab: number of the model's tokens. masks: a mask for each slot, in memory shared with the engine. The
        tokenizer has at least as many tokens as a slot has bits. The masks of further tokens are cut off."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._masks = masks
        self._channel = channel
        self._executor = LLExecutor(threads)
        words = -(-tokenizer.vocab_size // WORD)
        self._table = masks if words == masks.shape[1] else np.zeros((len(masks), words), np.uint32)
        self._goes_on = _bits(set(range(min(tokenizer.vocab_size, vocab))) - {*tokenizer.eos_tokens}, words)
        self._common = _words_of_characters(tokenizer)
        self._runs: dict[int, GrammarRun] = {}
        self._compiling = ThreadPoolExecutor(1, "djinn-compile")
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Answers messages until the engine hangs up."""
        for message, _ in self._channel.messages():
            match message:
                case BeginGrammar():
                    run = self._runs[message.run] = GrammarRun(message.run, message.slot)
                    self._compiling.submit(self._begin, run, message)
                case AdvanceGrammars():
                    self._advance(message)
                case TryTokens():
                    self._try(message)
                case EndGrammar():
                    self._runs.pop(message.run).is_over = True
        self._compiling.shutdown(cancel_futures=True)

    def _begin(self, run: GrammarRun, message: BeginGrammar) -> None:
        """Compiles the grammar of a run and computes its first mask, in the compiling thread. A run that has ended
        meanwhile is skipped."""
        if run.is_over:
            return
        try:
            matcher = compiled(message.grammar, self._tokenizer)
            if not matcher.consume_tokens(message.tokens):
                raise GrammarRejected(f"the output so far does not follow its grammar: {matcher.get_error()}")
            run.matcher = matcher
            states = self._look([run])
            run.has_begun = True
        except GrammarRejected as error:
            states = GrammarStates(others=[GrammarState(run.number, error=error.message)])
        self._tell(states)

    def _advance(self, message: AdvanceGrammars) -> None:
        runs = [self._runs[number] for number, _ in message.tokens]
        tokens = [tokens for _, tokens in message.tokens]
        self._executor.consume_token_par(
            [(_matcher(run), first) for run, (first, *_) in zip(runs, tokens, strict=True)]
        )
        for run, (_, *further) in zip(runs, tokens, strict=True):
            if further:
                _matcher(run).consume_tokens(further)
        self._tell(self._look(runs))

    # --- guesses ----------------------------------------------------------------------------------------------------

    def _try(self, message: TryTokens) -> None:
        """Computes the masks behind the tokens of each guess, as far as the grammar allows these. The output must be
        able to go on behind each, because the end of an output is found when its last token is told."""
        guesses = [(self._runs[number], tokens, slots) for number, tokens, slots in message.guesses]
        counts = dict.fromkeys([number for number, _, _ in message.guesses], 0)
        active = [(run, tokens[: _allowed(run, tokens)], slots) for run, tokens, slots in guesses]
        consumed = dict.fromkeys([run for run, _, _ in guesses], 0)
        at = 0
        while active := [each for each in active if at < len(each[1])]:
            for run, tokens, _ in active:
                _matcher(run).consume_token(tokens[at])
                consumed[run] += 1
            active = [each for each in active if not _matcher(each[0]).is_stopped()]
            self._compute([(run, slots[at]) for run, _, slots in active])
            active = [each for each in active if (self._table[each[2][at]] & self._goes_on).any()]
            self._publish([slots[at] for _, _, slots in active])
            at += 1
            counts.update({run.number: at for run, _, _ in active})
        for run, count in consumed.items():
            if count:
                _matcher(run).rollback(count)
        self._tell(GrammarStates(step=message.step, tried=[*counts.items()]))

    def _tell(self, states: GrammarStates) -> None:
        with self._sending:
            self._channel.send(states)

    # --- what may follow --------------------------------------------------------------------------------------------

    def _look(self, runs: Sequence[GrammarRun]) -> GrammarStates:
        """Writes each run's mask into its slot, for the position after the forced tokens."""
        self._compute([(run, run.slot) for run in runs])
        unclear = [run for run, is_clear in zip(runs, self._are_clear(runs), strict=True) if not is_clear]
        single = [run for run in unclear if np.bitwise_count(self._table[run.slot]).sum() == 1]
        forced = {run: tokens for run in single if (tokens := _forced(_matcher(run)))}
        self._compute([(run, run.slot) for run in forced])  # masks behind the forced tokens
        for run in runs:
            run.is_forced = run in forced
        self._publish([run.slot for run in runs])
        others = [state for run in unclear if (state := self._state(run, forced.get(run, [])))]
        told = {state.run for state in others}
        return GrammarStates([run.number for run in runs if run.number not in told], others)

    def _compute(self, places: Sequence[tuple[GrammarRun, int]]) -> None:
        """Writes each run's mask into a slot of the table."""
        nbytes = 4 * self._table.shape[1]
        if len(places) == 1:
            ((run, slot),) = places
            _matcher(run).unsafe_compute_mask_ptr(self._table[slot].ctypes.data, nbytes)
        elif places:
            jobs: list[Any] = [(_matcher(run), slot) for run, slot in places]
            self._executor.unsafe_compute_mask_ptr(jobs, self._table.ctypes.data, nbytes, len(self._table))

    def _publish(self, slots: list[int]) -> None:
        """Copies these masks to where the engine reads them, if the table is elsewhere."""
        if self._table is not self._masks:
            self._masks[slots] = self._table[slots, : self._masks.shape[1]]

    def _are_clear(self, runs: Sequence[GrammarRun]) -> list[bool]:
        """→ for each run, True if a few words of its mask show that the output has a choice: two tokens that do not end
        it. The engine then needs to know only the mask. Reading a whole mask takes 5 µs, and computing all masks of a
        step a few hundred."""
        slots = [run.slot for run in runs]
        common = self._table[np.ix_(slots, self._common)] & self._goes_on[self._common]
        has_two: list[bool] = (np.bitwise_count(common).sum(axis=1) > 1).tolist()
        return [clear and not _matcher(run).is_error() for run, clear in zip(runs, has_two, strict=True)]

    def _state(self, run: GrammarRun, forced: list[int]) -> GrammarState | None:
        """Returns None if the run's mask is all there is to report."""
        matcher = _matcher(run)
        goes_on = bool((self._table[run.slot] & self._goes_on).any())  # with a token of the model that does not end it
        try:
            expect_sound(matcher)
            if max(forced, default=0) >= self._vocab or not (goes_on or matcher.is_accepting()):
                raise GrammarRejected("the format demands what no token of the model can say", field="format")
        except GrammarRejected as error:
            return GrammarState(run.number, error=error.message)
        return None if goes_on and not forced else GrammarState(run.number, forced, ended=not goes_on)


def _words_of_characters(tokenizer: LLTokenizer) -> list[int]:
    """The words of a mask that hold the tokens of single characters. Most grammars allow some of these tokens at most
    times."""
    tokens = [tokenizer.greedy_tokenize(chr(code)) for code in range(ord(" "), ord("~") + 1)]
    return sorted({found[0] // WORD for found in tokens if len(found) == 1})


def _bits(tokens: Iterable[int], words: int) -> npt.NDArray[np.uint32]:
    """A mask of so many words that allows these tokens."""
    is_there = np.zeros(words * WORD, bool)
    is_there[[*tokens]] = True
    return np.packbits(is_there, bitorder="little").view(np.uint32)


def _forced(matcher: LLMatcher) -> list[int]:
    """→ the tokens that must come next. The matcher consumes them."""
    tokens = matcher.compute_ff_tokens()
    if tokens:
        matcher.consume_tokens(tokens)
    return tokens


def _allowed(run: GrammarRun, tokens: list[int]) -> int:
    """How many first tokens of a guess may follow; 0 if the run is not where its output is."""
    if not run.has_begun or run.is_forced or _matcher(run).is_stopped():
        return 0
    return int(_matcher(run).validate_tokens(tokens))


def _matcher(run: GrammarRun) -> LLMatcher:
    assert run.matcher is not None, "the engine advances only runs that have a mask"
    return run.matcher
