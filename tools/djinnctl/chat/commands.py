"""The commands of a conversation. They begin with a slash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from djinn_client import DjinnError
from djinnctl import explain
from djinnctl.chat import transcript
from djinnctl.chat.dialog import Dialog
from djinnctl.chat.typed import QUOTES, Command
from djinnctl.render import pages

Say = Callable[[str], None]


class Bye(Exception):
    """The conversation is over."""


class Entry(NamedTuple):
    usage: str
    meaning: str
    run: Callable[[Dialog, str, Say], None]


def obey(command: Command, dialog: Dialog, say: Say) -> None:
    """Does what the command says, or says what is wrong with it. Raises Bye."""
    name = {"?": "help", "exit": "bye", "quit": "bye"}.get(command.name, command.name)
    if name not in COMMANDS:
        say(f"there is no /{command.name}: see /help. A message that begins with a slash goes between two {QUOTES}")
        return
    try:
        COMMANDS[name].run(dialog, command.argument, say)
    except OSError as error:
        say(f"{error.filename or command.argument}: {error.strerror or error}")
    except ValueError as error:
        say(str(error))
    except DjinnError as error:
        say(error.message)


def _help(dialog: Dialog, argument: str, say: Say) -> None:
    width = max(len(entry.usage) for entry in COMMANDS.values())
    for entry in COMMANDS.values():
        say(f"{entry.usage:<{width}}  {entry.meaning}")
    say(f"{QUOTES:<{width}}  begins a message of several lines, which ends with {QUOTES}")
    say(f"{'Ctrl-C':<{width}}  stops the answer; Ctrl-D is /bye")


def _set(dialog: Dialog, argument: str, say: Say) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        for line in dialog.settings.lines():
            say(line)
        return
    dialog.settings.set(name, value.strip())


def _save(dialog: Dialog, argument: str, say: Say) -> None:
    path, branch = _path(argument), dialog.branch
    transcript.save(path, transcript.Transcript(branch.session.info.model, dialog.all_messages()))
    say(f"{len(branch.messages)} messages are in {path}")


def _load(dialog: Dialog, argument: str, say: Say) -> None:
    loaded = transcript.load(_path(argument))
    dialog.replace(loaded.messages)
    say(f"the conversation has {len(dialog.branch.messages)} messages now")


def _clear(dialog: Dialog, argument: str, say: Say) -> None:
    dialog.branch.messages.clear()
    say("the conversation begins anew")


def _fork(dialog: Dialog, argument: str, say: Say) -> None:
    before = dialog.number
    branch = dialog.fork()
    say(f"this is branch {dialog.number} now, session {branch.session.id}; `/switch {before}` goes back")


def _switch(dialog: Dialog, argument: str, say: Say) -> None:
    if not argument.isdecimal():
        raise ValueError(f"/switch takes the number of a branch, 1 to {len(dialog.branches)}")
    branch = dialog.switch(int(argument))
    say(f"this is branch {dialog.number}, session {branch.session.id}: {len(branch.messages)} messages")


def _pause(dialog: Dialog, argument: str, say: Say) -> None:
    moved = dialog.pause()
    say(f"{pages(moved)}, left the device; the next message brings it back")


def _why(dialog: Dialog, argument: str, say: Say) -> None:
    session = dialog.branch.session
    say(explain.told(session.id, session.why()))


def _bye(dialog: Dialog, argument: str, say: Say) -> None:
    raise Bye


def _path(argument: str) -> Path:
    if not argument:
        raise ValueError("name a file, as /save talk.json")
    return Path(argument).expanduser()


COMMANDS = {
    "help": Entry("/help", "shows these lines", _help),
    "set": Entry("/set NAME VALUE", "changes a setting, as temperature 0.5; /set alone shows all", _set),
    "save": Entry("/save FILE", "writes the conversation to a file, as JSON", _save),
    "load": Entry("/load FILE", "goes on from a saved conversation", _load),
    "clear": Entry("/clear", "begins the conversation anew", _clear),
    "fork": Entry("/fork", "goes on in a second session from the same point", _fork),
    "switch": Entry("/switch NUMBER", "goes back to another branch", _switch),
    "pause": Entry("/pause", "moves its pages off the device, until the next message", _pause),
    "why": Entry("/why", "says why the session runs, or what it waits for", _why),
    "bye": Entry("/bye", "leaves", _bye),
}
