"""Requests whose outputs follow grammars, in a real engine with a real grammar process."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence

import pytest

from djinn_client.protocol import Placing, Sampling
from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd import messages
from djinnd.core.tuning import GUESSES
from djinnd.engine.grammar import guidance
from djinnd.engine.grammar.process import GrammarProcess
from djinnd.jobs.grammar import SLOTS, GrammarStates, ToProcess, TryTokens
from djinnd.scheduler.batch.guesses import Guesses
from djinnd.scheduler.timing.step_times import StepTimes
from djinnd.text.grammar import grammar_text
from tests.support.engine_thread import EngineThread
from tests.support.serving import TINY
from tests.support.walks import END, tiny_tokenizer

FORMS = [r"[a-z \n]{30}", r"(abc){2}[!?]", r"[0-9]{4}-[0-9]{2}", r"Dear [A-Z][a-z]{2,9}, (yes|no)\."]


@pytest.fixture(scope="module")
def tiny() -> Iterator[EngineThread]:
    with EngineThread() as engine:
        engine.loaded(TINY)
        yield engine


@pytest.fixture
def engine(tiny: EngineThread) -> Iterator[EngineThread]:
    yield tiny
    for number in range(len(FORMS) + 1):
        tiny.send(messages.Close(str(number)))
    assert {"queued", "running", "held"}.isdisjoint(use.state for use in tiny.report().sessions)


def run_in(engine: EngineThread, form: str) -> int:
    """Starts a run in a session of its own, and returns the number of its request."""
    session, number = str(FORMS.index(form)), engine.number()
    engine.open(session)
    grammar = messages.Grammar(grammar_text(OutputFormat("regex", form)), 1, False, [END])
    sampling = Sampling(temperature=1.0, seed=number)
    run = messages.Run(number, session, [5, 6, 7], 60, sampling, stop_tokens=[END], grammar=grammar)
    with (TINY / "tokenizer.json").open("rb") as file:
        socket.send_fds(engine.socket, [messages.encode(run, 1)], [file.fileno()])
    return number


def outputs(engine: EngineThread) -> list[list[int]]:
    """Runs a free output, and one in each form beside it, and returns their tokens."""
    engine.open(str(len(FORMS)))
    free = engine.run(str(len(FORMS)), [5, 6, 7], 60)
    numbers = [run_in(engine, form) for form in FORMS]
    outcomes = engine.outcomes([free, *numbers])
    assert len(outcomes[free][0]) == 60
    assert all(isinstance(reply, messages.Finished) for _, reply in outcomes.values()), outcomes
    return [outcomes[number][0] for number in (free, *numbers)]


def texts(engine: EngineThread) -> list[str]:
    """The texts of the outputs in each form."""
    return [tiny_tokenizer().decode_str([t for t in tokens if t != END]) for tokens in outputs(engine)[1:]]


def test_the_figures_count_forced_tokens_as_generated_ones(engine: EngineThread) -> None:
    before = engine.report().generated_tokens
    free, *formed = outputs(engine)
    assert engine.report().generated_tokens - before == len(free) + sum(map(len, formed))


def test_each_output_has_its_form(engine: EngineThread) -> None:
    for form, text in zip(FORMS, texts(engine), strict=True):
        assert re.fullmatch(form, text)


def test_a_row_whose_mask_is_late_is_run_again(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "PATIENCE", 0.0)  # each mask that is not there already is late
    for form, text in zip(FORMS, texts(engine), strict=True):
        assert re.fullmatch(form, text)


# --- guesses ----------------------------------------------------------------------------------------------------------


CODE = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\n"
GUESSED = [r"[a-z \n(),:+-]{60}", r"(def [a-z]+\(a, b\):\n    return a [+-] b\n\n){3}", r"[ab\n ]{40}"]


def guessed_outputs(engine: EngineThread, tag: str) -> tuple[list[list[int]], int]:
    """Runs an output in each form behind a repetitive prompt. → their tokens, and how many of them were guessed."""
    numbers = []
    for form in GUESSED:
        session, number = f"{tag} {form}", engine.number()
        engine.open(session)
        grammar = messages.Grammar(grammar_text(OutputFormat("regex", form)), 1, False, [END])
        prompt = tiny_tokenizer().tokenize_str(CODE * 3)
        run = messages.Run(number, session, prompt, 60, Sampling(), stop_tokens=[END], grammar=grammar)
        with (TINY / "tokenizer.json").open("rb") as file:
            socket.send_fds(engine.socket, [messages.encode(run, 1)], [file.fileno()])
        numbers.append(number)
    outcomes = engine.outcomes(numbers)
    replies = [outcomes[number][1] for number in numbers]
    assert all(isinstance(reply, messages.Finished) for reply in replies), replies
    for process in engine.engine._guidance._processes:
        assert sorted(process.free) == list(range(SLOTS))
    return [outcomes[number][0] for number in numbers], sum(reply.kept for reply in replies)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def without_guesses(tiny: EngineThread) -> list[list[int]]:
    return guessed_outputs(tiny, "without")[0]


@pytest.fixture(scope="module")
def guessing() -> Iterator[EngineThread]:
    """An engine to which guesses seem to cost nothing, whatever the times of its steps are."""
    with pytest.MonkeyPatch.context() as patch, EngineThread(max_batch_tokens=256) as engine:
        patch.setattr(Guesses, "_worth", lambda *given: GUESSES.least_chance)
        patch.setattr(StepTimes, "predict", lambda *given: 0.0)
        engine.loaded(TINY, placing=Placing(speculation=True))
        yield engine


def test_guesses_are_kept_where_the_form_allows_them(
    guessing: EngineThread, without_guesses: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guidance, "PATIENCE", 10.0)
    tokens, kept = guessed_outputs(guessing, "with")
    assert tokens == without_guesses and kept > 20


@pytest.mark.parametrize("shown", [0, 1])
def test_samples_whose_masks_are_not_there_do_not_count(
    guessing: EngineThread, without_guesses: list[list[int]], monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    """The process seems to have computed at most so many masks of each guess."""
    take = guidance.Guidance._take

    def takes_less(self: guidance.Guidance, heard: GrammarStates) -> None:
        heard.tried = [(number, min(count, shown)) for number, count in heard.tried]
        take(self, heard)

    monkeypatch.setattr(guidance, "PATIENCE", 10.0)
    monkeypatch.setattr(guidance.Guidance, "_take", takes_less)
    tokens, kept = guessed_outputs(guessing, f"shown {shown}")
    assert tokens == without_guesses and (kept > 0) == (shown > 0)


def test_a_process_that_answers_too_late_gets_no_more_guesses(
    guessing: EngineThread, without_guesses: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = list[int](), GrammarProcess.ask

    def noted(self: GrammarProcess, message: ToProcess, runs: Sequence[int] = ()) -> None:
        if isinstance(message, TryTokens):
            asked.extend(number for number, _, _ in message.guesses)
        else:
            ask(self, message, runs)

    monkeypatch.setattr(GrammarProcess, "ask", noted)
    tokens, kept = guessed_outputs(guessing, "late")
    assert tokens == without_guesses and kept == 0
    assert asked and len(asked) == len(set(asked))
