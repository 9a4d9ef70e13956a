"""The grammar process's work, in this process: states and masks of runs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd.grammars.serving import GrammarService
from djinnd.jobs.grammar import (
    SLOTS,
    WORD,
    AdvanceGrammars,
    BeginGrammar,
    EndGrammar,
    GrammarState,
    TryTokens,
    words_of,
)
from djinnd.text.grammar import compiled, grammar_text, open_tokenizer
from tests.support.serving import TINY
from tests.support.walks import END, tiny_tokenizer


class Talk:
    """A channel that has said these messages, one after another, each when the last one has been answered."""

    def __init__(self, *messages: Any) -> None:
        self.said: list[GrammarState] = []
        self.tried: list[dict[int, int]] = []  # for each Try
        self._messages = messages
        self._answered = threading.Event()

    def messages(self) -> Any:
        for message in self._messages:
            yield message, []
            if not isinstance(message, EndGrammar):  # which has no answer
                assert self._answered.wait(60)
                self._answered.clear()

    def send(self, message: Any) -> None:
        self.said += [*map(GrammarState, message.plain), *message.others]
        if message.step:
            self.tried.append(dict(message.tried))
        self._answered.set()


def served(*messages: Any, vocab: int = 2048) -> tuple[list[GrammarState], Any]:
    talk, masks = talked(*messages, vocab=vocab)
    return talk.said, masks


def talked(*messages: Any, vocab: int = 2048) -> tuple[Talk, Any]:
    talk = Talk(*messages)
    masks = np.full((SLOTS, words_of(vocab)), 0xFFFFFFFF, np.uint32)
    tokenizer = open_tokenizer((TINY / "tokenizer.json").read_text(), [END], WORD * masks.shape[1])
    GrammarService(tokenizer, vocab, masks, 1, talk).serve()  # type: ignore[arg-type]
    return talk, masks


def allowed(mask: Any) -> list[str]:
    tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return sorted(tiny_tokenizer().decode_str([token]) for token in tokens)


def ids(text: str) -> list[int]:
    return tiny_tokenizer().tokenize_str(text)


def regex(text: str) -> str:
    return grammar_text(OutputFormat("regex", text))


def test_a_run_from_its_begin_to_its_end() -> None:
    states, masks = served(
        BeginGrammar(1, 5, regex("[xy]z?"), []),
        AdvanceGrammars([(1, ids("x")[:1])]),
        AdvanceGrammars([(1, ids("z")[:1])]),
        EndGrammar(1),
    )
    assert [(state.run, state.forced, state.ended, state.error) for state in states] == [
        (1, [], False, ""),
        (1, [], False, ""),
        (1, [], True, ""),
    ]
    assert allowed(masks[5]) == ["<|endoftext|>"]


def test_forced_tokens_come_with_the_mask_behind_them() -> None:
    states, masks = served(BeginGrammar(1, 0, regex("hello world[!?]"), []))
    assert states[0].forced == ids("hello world") and not states[0].ended
    assert allowed(masks[0]) == ["!", "?"]


def test_an_output_goes_on_behind_its_tokens() -> None:
    states, masks = served(
        BeginGrammar(1, 0, regex("(abc){2}[!?]"), [*ids("abc")]), BeginGrammar(2, 1, regex("abc"), ids("xyz"))
    )
    assert states[0].forced == ids("abc") and allowed(masks[0]) == ["!", "?"]
    assert "does not follow its grammar" in states[1].error


def test_runs_are_advanced_together_and_one_that_errs_ends_alone() -> None:
    states, masks = served(
        BeginGrammar(1, 0, regex("[xy]+"), []),
        BeginGrammar(2, 1, regex("[xy]+"), []),
        AdvanceGrammars([(1, ids("x")[:1]), (2, ids("7")[:1])]),
    )
    assert not states[2].error and states[3].run == 2 and states[3].error
    assert "x" in allowed(masks[0])


def test_a_grammar_that_nothing_meets_is_refused() -> None:
    states, _ = served(BeginGrammar(1, 0, grammar_text(OutputFormat("lark", "start: X\nX: /a/ & /b/")), []))
    assert states[0].error


def test_padding_is_never_allowed_and_what_the_model_lacks_neither() -> None:
    _, masks = served(BeginGrammar(1, 0, regex("(?s:.*)"), []), vocab=3000)
    assert not masks[0, 2048 // 32 :].any() and masks[0, : 2048 // 32].any()
    narrow = END + 1 + max(ids("!"))  # of a model that has no more tokens than these
    states, _ = served(BeginGrammar(1, 0, regex("hello"), []), BeginGrammar(2, 1, regex("[!]"), []), vocab=narrow)
    assert states[0].error and not states[1].error


def test_masks_are_what_a_run_alone_would_have() -> None:
    """Some forms leave much open, others little. Masks are computed one by one and in parallel, for models with more
    and fewer tokens than the tokenizer."""
    forms = [r"[a-z \n]{9}", "[A-Za-z0-9_]{3,20}", "(abc){2}[!?]", "[!]", "x", "(?s:.*)", "[0-9]{4}-[0-9]{2}"]
    begins = [BeginGrammar(number, 9 - number, regex(form), []) for number, form in enumerate(forms)]
    tokens = {0: ids("z"), 1: ids("z"), 5: ids("z")}
    alone = LLTokenizer((TINY / "tokenizer.json").read_text(), eos_token=[END], slices=[])
    for vocab in (2048, 3000, END + 1 + max(ids("z"))):
        told, masks = served(*begins, AdvanceGrammars([*tokens.items()]), vocab=vocab)
        states = {state.run: state for state in told}
        for run, begin in enumerate(begins):
            matcher = compiled(begin.grammar, alone)
            assert states[run].error or matcher.consume_tokens(tokens.get(run, []) + states[run].forced)
            whole = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:2048]
            width = min(2048, WORD * masks.shape[1])
            mine = np.unpackbits(masks[begin.slot].view(np.uint8), bitorder="little")
            assert states[run].error or ((mine[:width] == whole[:width]).all() and not mine[width:].any())


def test_a_try_gives_a_mask_behind_each_token_that_may_follow_and_changes_no_state() -> None:
    number = BeginGrammar(1, 0, regex("[0-9]{3}-[0-9]{2}[a-z]?"), [])
    word = BeginGrammar(2, 1, regex("[a-f]+[!?]"), [])
    guesses = [(1, [*ids("1"), *ids("2"), *ids("x")], [10, 11, 12]), (2, [*ids("a"), *ids("!")], [20, 21])]
    talk, masks = talked(number, word, TryTokens(7, guesses), TryTokens(8, guesses))
    assert talk.tried == [{1: 2, 2: 1}] * 2, "x may not follow, and nothing can follow !"
    said, expected = served(
        number, word, AdvanceGrammars([(1, ids("1"))]), AdvanceGrammars([(1, ids("2")), (2, ids("a"))])
    )
    assert allowed(masks[11]) == allowed(expected[0]) and allowed(masks[20]) == allowed(expected[1])
    assert "3" in allowed(masks[10]) and "-" not in allowed(masks[10])
    assert not any(state.error for state in said)
    again, masks = talked(number, TryTokens(7, guesses[:1]), AdvanceGrammars([(1, [*ids("1"), *ids("2")])]))
    assert not again.said[-1].error and allowed(masks[0]) == allowed(expected[0])


def test_a_run_that_is_ahead_of_its_output_or_at_its_end_has_no_masks_for_guesses() -> None:
    forced = BeginGrammar(1, 0, regex("hello world[!?]"), [])
    ended = BeginGrammar(2, 1, regex("x?"), [])
    talk, _ = talked(
        forced, ended, AdvanceGrammars([(2, ids("x"))]), TryTokens(3, [(1, ids("!"), [10]), (2, ids("x"), [11])])
    )
    assert talk.tried == [{1: 0, 2: 0}]


def test_a_run_gets_no_masks_for_guesses_while_another_thread_computes_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look = GrammarService._look

    def looking(service: GrammarService, runs: Any) -> Any:
        service._try(TryTokens(5, [(1, ids("1"), [10])]))
        return look(service, runs)

    monkeypatch.setattr(GrammarService, "_look", looking)
    talk, _ = talked(BeginGrammar(1, 0, regex("[0-9]{3}"), []))
    assert talk.tried == [{1: 0}]
