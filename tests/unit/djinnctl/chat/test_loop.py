"""A conversation with a scripted daemon: its requests, its output, and its messages."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from djinn_client.protocol import (
    Cancel,
    CloseSession,
    Done,
    ExplainSession,
    Failure,
    ForkSession,
    Generate,
    Generated,
    PauseReply,
    PauseSession,
    Piece,
    ResumeSession,
    SessionOpened,
    Timings,
    Usage,
    WhyReply,
)
from djinn_client.protocol.fields.chat import ChatDelta, ChatMessage
from djinn_client.protocol.fields.scheduling import Why
from djinnctl.chat import loop
from djinnctl.chat.dialog import Dialog
from djinnctl.chat.settings import Settings
from djinnctl.chat.terminal import Answer
from djinnctl.cli import main
from tests.support.scripted_daemon import Line, ScriptedDaemon, session_info

USAGE = Usage(prompt_tokens=5, generated_tokens=3, session_tokens=20, computed_tokens=5)
TIMINGS = Timings(queued=0.0, first_token=0.1, total=0.3)


class Model:
    """Answers with what it was asked last, in two pieces; to "refuse" with an error, to "sea" without an end."""

    def __init__(self) -> None:
        self.asked: list[Generate] = []
        self.others: list[Any] = []

    @property
    def chats(self) -> list[list[dict[str, Any]]]:
        return [json.loads(request.chat.messages) for request in self.asked if request.chat is not None]

    def __call__(self, line: Line) -> None:
        line.welcome()
        while (request := line.receive()) is not None:
            match request:
                case Generate():
                    self.asked.append(request)
                    self._answer(line, request)
                case Cancel(target=target):
                    line.send(Failure(id=target, code="cancelled", message="the request was cancelled"))
                case PauseSession(id=id):
                    self.others.append(request)
                    line.send(PauseReply(id=id, tier="host", pages=2, nbytes=1 << 20, seconds=0.01))
                case ExplainSession(id=id):
                    line.send(WhyReply(id=id, why=Why(state="idle", reason="no call runs")))
                case CloseSession(id=id) | ResumeSession(id=id):
                    self.others.append(request)
                    line.send(Done(id=id))
                case ForkSession(id=id):
                    line.send(SessionOpened(id=id, session=session_info(id="s-2")))
                case _:
                    line.send(SessionOpened(id=request.id, session=session_info()))  # type: ignore[union-attr]

    def _answer(self, line: Line, request: Generate) -> None:
        text = self.chats[-1][-1]["content"]
        if text == "refuse":
            line.send(Failure(id=request.id, code="invalid_request", message="the template refuses that"))
            return
        line.send(Piece(id=request.id, text="", delta=ChatDelta(reasoning="Hm.")))
        line.send(Piece(id=request.id, text=f"{text}, "))
        if text != "sea":
            message = ChatMessage(content=f"{text}, you said", reasoning="Hm.")
            is_long = text == "a story"
            line.send(
                Generated(
                    id=request.id,
                    text="you said",
                    token_ids=[],
                    finish_reason="length" if is_long else "stop",
                    notes=["the context is nearly full"] if is_long else [],
                    usage=USAGE,
                    timings=TIMINGS,
                    message=message,
                )
            )


class CtrlC(io.StringIO):
    """An output at which Ctrl-C is pressed when this text has been written."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def write(self, text: str) -> int:
        super().write(text)
        if text == self._text:
            raise KeyboardInterrupt
        return len(text)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def address(daemon: ScriptedDaemon, model: Model) -> str:
    return daemon.play(model)


@pytest.fixture
def dialog(address: str) -> Iterator[Dialog]:
    dialog = Dialog("smollm2", Settings(), priority=None, address=address)
    yield dialog
    dialog.close()


@pytest.fixture
def talk(
    dialog: Dialog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Types these lines and Ctrl-D. Returns stdout and stderr."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def talk(*lines: str | type[BaseException]) -> tuple[str, str]:
        typed = iter(lines)

        def read_line(prompt: str) -> str:
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        loop.talk(dialog, read_line)
        shown = capsys.readouterr()
        return shown.out, shown.err

    return talk


def test_typed_lines_become_messages_with_the_settings(talk: Callable[..., tuple[str, str]], model: Model) -> None:
    out, err = talk("/set system Be brief.", "/set think off", "/set stats on", '"""one', 'two"""', "three")
    assert out == "one\ntwo, you said\nthree, you said\n\n"
    assert "3 tokens, the first after 100 ms, 10 tokens/s; of 17 tokens before them 5 were computed" in err
    assert model.chats[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "one\ntwo, you said", "reasoning_content": "Hm."},
        {"role": "user", "content": "three"},
    ]
    (first, _), chat = model.asked, model.asked[0].chat
    assert chat is not None and json.loads(chat.arguments) == {"enable_thinking": False}
    assert (first.sampling.temperature, first.max_tokens) == (0.7, None)


def test_an_error_leaves_the_conversation_as_it_was(talk: Callable[..., tuple[str, str]], model: Model) -> None:
    out, err = talk("refuse", "hello", "/set temperature hot", "/nonesuch", "/load /nowhere.json", "/save")
    assert out == "hello, you said\n\n"
    assert "djinnctl: the template refuses that\n" in err
    assert [message["content"] for message in model.chats[1]] == ["hello"]
    assert "temperature is a number, 0 or more, not 'hot'" in err
    assert "there is no /nonesuch: see /help" in err
    assert "/nowhere.json: No such file or directory" in err
    assert "name a file, as /save talk.json" in err


def test_ctrl_c_at_the_prompt_drops_the_line(talk: Callable[..., tuple[str, str]], model: Model) -> None:
    _, err = talk('"""never', KeyboardInterrupt, "hello", "/bye", "not sent")
    assert "Ctrl-D or /bye leaves" in err
    assert [chat[-1]["content"] for chat in model.chats] == ["hello"]


def test_ctrl_c_stops_the_answer_and_keeps_what_has_come(dialog: Dialog, model: Model) -> None:
    with pytest.raises(KeyboardInterrupt):
        dialog.ask("sea", Answer(CtrlC("sea, ")))
    so_far = [{"role": "user", "content": "sea"}, {"role": "assistant", "content": "sea, "}]
    assert dialog.branch.messages == so_far
    assert dialog.ask("hello", Answer(io.StringIO())).text == "hello, you said"
    assert model.chats[1][:2] == so_far


def test_the_reason_for_a_silence_is_shown_once(
    talk: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elapsed(threading.Timer):
        def start(self) -> None:
            assert self.interval == 5.0
            self.function()

    monkeypatch.setattr(threading, "Timer", Elapsed)
    _, err = talk("hello")
    assert err.count("waiting: no call runs\n") == 1


def test_a_saved_conversation_goes_on(
    talk: Callable[..., tuple[str, str]], dialog: Dialog, model: Model, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    talk("/set system Be brief.", "hello", f"/save {file}", "/clear", "/set system Be long.", f"/load {file}", "again")
    assert [message["content"] for message in model.chats[1]] == ["Be brief.", "hello", "hello, you said", "again"]
    assert json.loads(file.read_text())["model"] == "djinn-tiny"


def test_an_answer_that_is_cut_off_says_why_and_what_helps(talk: Callable[..., tuple[str, str]]) -> None:
    _, err = talk("a story", "/set max_tokens 3", "a story")
    assert "the answer was cut off: the context is full, and /clear begins anew" in err
    assert "the answer was cut off after max_tokens = 3: /set max_tokens (or --set) allows more" in err
    assert err.count("the context is nearly full") == 2, "notes of a reply are shown"


def test_forks_and_pauses(talk: Callable[..., tuple[str, str]], dialog: Dialog, model: Model) -> None:
    _, err = talk("one", "/pause", "/fork", "two", "/switch 1", "three", "/switch 3", "/why", "/help")
    assert "2 pages, 1.0 MiB, left the device; the next message brings it back" in err
    assert "this is branch 2 now, session s-2; `/switch 1` goes back" in err
    assert "there is no branch 3: there are 1 to 2" in err
    assert "s-1 is idle: no call runs" in err
    assert [request.session for request in model.asked] == ["s-1", "s-2", "s-1"]
    assert [[m["content"] for m in chat if m["role"] == "user"] for chat in model.chats[1:]] == [
        ["one", "two"],
        ["one", "three"],
    ]
    assert [type(request) for request in model.others] == [PauseSession, ResumeSession], "it is woken once"
    assert max(map(len, err.splitlines())) <= 80


def run(*arguments: str, address: str, stdin: str | None = None) -> Result:
    return CliRunner(env={"DJINND_ADDRESS": address, "NO_COLOR": "1"}).invoke(main, ["run", *arguments], input=stdin)


def test_one_answer_and_no_more(address: str, model: Model) -> None:
    result = run("smollm2", "hello", "there", "--set", "temperature=0", "--system", "Be brief.", address=address)
    assert (result.exit_code, result.stdout) == (0, "hello there, you said\n")
    assert model.chats[0][0] == {"role": "system", "content": "Be brief."}
    assert model.asked[0].sampling.temperature == 0.0
    shown = json.loads(run("smollm2", "hello", "--json", address=address).stdout)
    assert (shown["message"]["content"], shown["message"]["reasoning"]) == ("hello, you said", "Hm.")


def test_text_from_a_pipe_follows_the_prompt(address: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"a long text\n")
    os.close(theirs)
    with open(ours) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        main(["run", "smollm2", "Shorten:", "--address", address], standalone_mode=False)
    assert model.chats[0][-1]["content"] == "Shorten:\n\na long text"


def test_errors_end_run_with_their_exit_codes(address: str) -> None:
    assert run("smollm2", "refuse", address=address).exit_code == 1
    assert "nothing to say" in run("smollm2", address=address).stderr
    wrong = run("smollm2", "hello", "--set", "heat=1", address=address)
    assert wrong.exit_code == 2 and "no setting is called 'heat'" in wrong.stderr
    assert run("smollm2", "hello", address="/nowhere").exit_code == 2
