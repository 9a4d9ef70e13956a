"""The loop of `djinnctl run`: reads a line, does what it asks for, reads the next one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import TextIO

from djinn_client import DjinnError, Generated, Session
from djinnctl.chat.commands import Bye, obey
from djinnctl.chat.dialog import Dialog
from djinnctl.chat.terminal import FURTHER, PROMPT, Answer, history, note
from djinnctl.chat.typed import Command, Typed
from djinnctl.command import after_silence
from djinnctl.units import interval

ReadLine = Callable[[str], str]


def talk(dialog: Dialog, read_line: ReadLine = input) -> None:
    """Reads lines and does what they ask for, until /bye or Ctrl-D."""
    typed = Typed()
    note(f"{dialog.branch.session.info.model}: write a message; /help has the commands, Ctrl-D leaves")
    with history():
        while True:
            try:
                line = read_line(FURTHER if typed.inside else PROMPT)
            except KeyboardInterrupt:
                typed.drop()
                note("\nCtrl-D or /bye leaves")
                continue
            except EOFError:
                print()
                return
            try:
                _take(line, typed, dialog)
            except Bye:
                return


def _take(line: str, typed: Typed, dialog: Dialog) -> None:
    """Ctrl-C stops only what the line has begun. An error ends nothing: the session is still there, also after a
    restart of the daemon."""
    wanted = typed.add(line)
    try:
        if isinstance(wanted, Command):
            obey(wanted, dialog, note)
        elif wanted is not None:
            ask(dialog, wanted)
    except KeyboardInterrupt:
        note("stopped")
    except DjinnError as error:
        note(f"djinnctl: {error.message}")


def ask(dialog: Dialog, text: str, out: TextIO | None = None) -> Generated:
    """Sends a message and writes the answer as it comes. Raises the daemon's error."""
    answer = Answer(out or sys.stdout)
    with _patience(dialog.branch.session, answer):
        result = dialog.ask(text, answer)
    if result.finish_reason == "length":
        note(cut_short(dialog.settings.options["max_tokens"]))
    for told in result.notes:
        note(told)
    if dialog.settings.stats:
        note(stats(result))
    return result


def _patience(session: Session, answer: Answer) -> AbstractContextManager[None]:
    """If nothing of the answer has come after SILENCE_S, says once what the session waits for."""

    def tell() -> None:
        with suppress(DjinnError):  # it may have been closed meanwhile
            if not answer.begun and (why := session.why()) and not answer.begun:
                note(f"waiting: {why.reason}")

    return after_silence(tell)


def cut_short(max_tokens: int | None) -> str:
    """Why an answer was cut off, and what helps."""
    if max_tokens is None:
        return "the answer was cut off: the context is full, and /clear begins anew"
    return f"the answer was cut off after max_tokens = {max_tokens}: /set max_tokens (or --set) allows more"


def stats(result: Generated) -> str:
    usage, timings = result.usage, result.timings
    seconds = timings.total - timings.first_token
    rate = f", {(usage.generated_tokens - 1) / seconds:.3g} tokens/s" if usage.generated_tokens > 1 and seconds else ""
    return (
        f"{usage.generated_tokens} tokens, the first after {interval(timings.first_token)}{rate}; of "
        f"{usage.session_tokens - usage.generated_tokens} tokens before them {usage.computed_tokens} were computed"
    )
