"""Requests whose outputs follow grammars, in a real engine with a real grammar process."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from djinn_client.protocol import Sampling
from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd import messages
from djinnd.engine.grammar import guidance
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
