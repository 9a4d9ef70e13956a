"""A run whose text comes late: with a worker that answers when the test says so."""

from __future__ import annotations

from typing import Any

import pytest

from djinn_client.errors import DjinnError, TextFailed
from djinn_client.protocol import Generate, Logprobs, Sampling
from djinn_client.protocol.fields.chat import ChatDelta, ToolCallDelta
from djinnd.jobs.text import READ_TOKENS, BeginReading, ChatReading, EndReading, ReadText, ReadTokens
from djinnd.server.text.generation import Generation
from djinnd.server.text.worker_reading import MOST_BEHIND, WorkerReading
from djinnd.text.chat.answer import ChatAnswer
from djinnd.text.reader import ReadingRules
from djinnd.text.vocabulary import Vocabulary
from djinnd.text_worker.serving import TextService

PROMPT = [5, 6]
TEMPLATE = "<think></think><tool_call>"
STORY = 'def greet(name):\n    return f"Größe 😀 {name}"\n'


class Worker:
    """A text worker's loop in this process. It answers one question for each `answer`."""

    def __init__(self, tiny: Any) -> None:
        self.readings = 0
        self.asked: list[ReadTokens] = []
        self.told: list[BeginReading | EndReading] = []
        self._then: list[Any] = []
        self._serving = TextService()
        self._serving._vocabularies[1] = Vocabulary(tiny, frozenset({0}), {"default": TEMPLATE})

    def ask(self, question: ReadTokens, then: Any) -> None:
        self.asked.append(question)
        self._then.append(then)

    def tell(self, message: BeginReading | EndReading) -> None:
        self.told.append(message)
        self._serving.answer(message, [])

    def answer(self, answer: Any = None) -> None:
        self._then.pop(0)(answer or self._serving.answer(self.asked[-1], []))

    def answer_all(self) -> None:
        while self._then:
            self.answer()


class Play:
    """Plays the run: hears of pieces, of the fault, and of being held."""

    def __init__(self, tiny: Any, chat: ChatReading | None = None, **request: Any) -> None:
        self.session = [7, *PROMPT]
        self.pieces: list[Any] = []
        self.fault: DjinnError | None = None
        self.held: list[bool] = []
        self.ends = 0
        self.worker = Worker(tiny)
        message = Generate(id=9, session="s", token_ids=PROMPT, **request)
        answer = None if chat is None else ChatAnswer()
        self.generation = Generation(message, self.session, len(PROMPT), {0}, None, 100.0, is_late=True, chat=answer)
        rules = ReadingRules(message.stop, message.skip_special_tokens, message.sampling.min_tokens)
        self.late = WorkerReading(self.worker, 1, self.session, rules, chat, self)  # type: ignore[arg-type]

    def feed(self, tokens: list[int]) -> None:
        for at, token in enumerate(tokens):
            assert self.generation.token(token, Logprobs(-1.0), 101.0 + at) is None
            self.late.go_on(self.generation)

    def finish(self) -> Any:
        self.late.finish(self.generation, self._ended)
        self.worker.answer_all()
        assert self.ends == 1 and self.worker.readings == 0
        return self.generation.finish("length", 3, 200.0)

    def _ended(self) -> None:
        self.ends += 1

    def text_came(self, read: ReadText) -> None:
        piece = self.generation.heard(read)
        if piece is not None:
            self.pieces.append(piece)

    def text_failed(self, error: DjinnError) -> None:
        self.fault = error

    def text_behind(self, is_behind: bool) -> None:
        self.held.append(is_behind)


@pytest.fixture
def story(tiny: Any) -> list[int]:
    return tiny.encode(STORY).ids  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [[], ["never"]])
def test_all_text_comes_in_order_however_late(tiny: Any, story: list[int], stream: bool, stop: list[str]) -> None:
    play = Play(tiny, stream=stream, stop=stop, logprobs=0)
    play.feed(story[:5])
    if stream:
        play.worker.answer()
    play.feed(story[5:])
    told = [*play.pieces, play.finish()]
    told = [*play.pieces, told[-1]]
    assert "".join(each.text for each in told) == STORY
    assert [token for each in told for token in each.token_ids] == story
    assert all(len(each.logprobs) == len(each.token_ids) for each in told)
    assert not play.held


@pytest.mark.parametrize("stream", [False, True])
def test_the_worker_names_tokens_with_their_text(tiny: Any, story: list[int], stream: bool) -> None:
    play = Play(tiny, stream=stream, token_bytes=True)
    play.feed(story)
    told = [*play.pieces, play.finish()]
    told = [*play.pieces, told[-1]]
    found = {token: text for each in told for token, text in each.token_bytes.items()}
    assert b"".join(found[token] for token in story).decode() == STORY
    assert sum(len(each.token_bytes) for each in told) == len({*story})


def test_a_worker_that_names_other_tokens_than_it_was_asked_for(tiny: Any, story: list[int]) -> None:
    play = Play(tiny, stream=True, token_bytes=True)
    play.feed(story[:1])
    play.worker.answer(ReadText("d", token_bytes={9999: b"x"}))
    assert play.pieces[0].token_bytes == {story[0]: b""}


def test_one_question_at_a_time_takes_all_tokens_that_came_meanwhile(tiny: Any, story: list[int]) -> None:
    play = Play(tiny, stream=True)
    play.feed(story)
    assert [len(read.tokens) for read in play.worker.asked] == [1]
    play.worker.answer()
    assert [len(read.tokens) for read in play.worker.asked] == [1, len(story) - 1]


def test_a_stop_string_that_is_found_late_cuts_what_came_behind_it(tiny: Any, story: list[int]) -> None:
    play = Play(tiny, stream=True, stop=["return"], logprobs=0)
    play.feed(story)
    reply = play.finish()
    told = [*play.pieces, reply]
    keep = play.generation.keep
    assert keep is not None and keep < len(story)
    assert "".join(each.text for each in told) == STORY[: STORY.index("return")]
    assert [token for each in told for token in each.token_ids] == story[:keep]
    assert play.session == [7, *PROMPT, *story[:keep]] and reply.finish_reason == "stop"
    assert sum(len(each.logprobs) for each in told) == keep
    play.feed(story)  # the engine went on until it heard of it
    assert play.session == [7, *PROMPT, *story[:keep]]


def test_a_run_is_held_while_its_text_is_far_behind(tiny: Any) -> None:
    play = Play(tiny)
    play.feed([20] * (READ_TOKENS + MOST_BEHIND + 1))
    assert play.held == [True]
    play.worker.answer()
    assert max(len(read.tokens) for read in play.worker.asked) <= READ_TOKENS
    assert play.held == [True, False]
    assert len(play.finish().token_ids) == READ_TOKENS + MOST_BEHIND + 1


@pytest.mark.parametrize(
    "answer",
    [
        TextFailed("the worker has ended"),
        ReadText("x" * 100_000),
        ReadText("", delta=ChatDelta("x" * 50_000, [ToolCallDelta(0, "id", "f", "x" * 50_000)])),
        ReadText("", delta=ChatDelta(tool_calls=[ToolCallDelta(number) for number in range(100_000)])),
        ReadText("", stopped_after=5),
        ReadText("", stopped_after=-1),
    ],
)
@pytest.mark.parametrize("when", ["running", "ended"])
def test_a_worker_that_fails_or_lies_ends_the_run_once(tiny: Any, answer: Any, when: str) -> None:
    play = Play(tiny, stream=True)
    play.feed([20, 21])
    if when == "ended":
        play.late.finish(play.generation, play._ended)
    play.worker.answer(answer)
    assert isinstance(play.fault, TextFailed)
    assert play.worker.readings == 0 and play.worker.told[-1].__class__ is EndReading
    play.feed([22])
    if when == "running":
        play.late.finish(play.generation, play._ended)
    assert play.ends == 1 and len(play.worker.asked) == 1
    play.late.end()
    assert play.worker.readings == 0


def test_an_ended_run_gets_no_more_text(tiny: Any) -> None:
    play = Play(tiny, stream=True)
    play.feed([20])
    play.late.end()
    play.worker.answer_all()
    assert not play.pieces and play.fault is None and play.worker.readings == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("least", [0, 12])
def test_a_chat_ends_with_the_token_that_completes_a_stop_string(tiny: Any, stream: bool, least: int) -> None:
    text = "<think>stop</think>go and stop here, and then stop again"
    tokens = tiny.encode(text).ids
    chat = ChatReading("", b"", ["stop"], parallel=True)
    play = Play(tiny, chat, stream=stream, stop=["stop"], sampling=Sampling(min_tokens=least and len(tokens) - 5))
    play.feed(tokens)
    reply = play.finish()
    said = "go and stop here, and then " if least else "go and "
    assert reply.message.content == said and reply.message.reasoning == "stop"
    assert "".join(each.text for each in [*play.pieces, reply]) == said
    assert tiny.decode(play.session[3:]).endswith("stop") and reply.stopped_by == "stop"
    assert tiny.decode(play.session[3:]) == text[: text.index(said) + len(said) + 4]


@pytest.mark.parametrize("stream", [False, True])
def test_the_worker_parses_the_answer_of_a_chat(tiny: Any, stream: bool) -> None:
    tools = b'[{"type": "function", "function": {"name": "f", "parameters": {}}}]'
    call = '<tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>'
    for parallel, count in ((True, 2), (False, 1)):
        play = Play(tiny, ChatReading("<think>", tools, [], parallel), stream=stream)
        for token in tiny.encode(f"Hm.</think>Well.{call}{call}").ids:
            play.feed([token])
            play.worker.answer_all()
        reply = play.finish()
        message, deltas = reply.message, [each.delta for each in [*play.pieces, reply] if each.delta]
        assert (message.content, message.reasoning) == ("Well.", "Hm.")
        assert [(each.name, each.arguments) for each in message.tool_calls] == [("f", '{"a": [1, 2]}')] * count
        assert "".join(each.text for each in [*play.pieces, reply]) == "Well."
        parts = [part for delta in deltas for part in delta.tool_calls]
        assert "".join(part.arguments for part in parts) == '{"a": [1, 2]}' * count
        assert len(deltas) > 2 if stream else len(deltas) == 1
