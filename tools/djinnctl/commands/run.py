"""`djinnctl run`: talk to a model."""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import TYPE_CHECKING

import click

from djinn_client.protocol import CLASSES
from djinnctl.command import Settings, command
from djinnctl.commands.completion import complete_model

if TYPE_CHECKING:
    from djinn_client.protocol import Class


@command()
@click.argument("model", shell_complete=complete_model)
@click.argument("prompt", nargs=-1)
@click.option("--system", metavar="TEXT", default="", help="The system message.")
@click.option(
    "--set",
    "chosen",
    metavar="NAME=VALUE",
    multiple=True,
    help="A setting, such as temperature=0; docs/reference/cli.md lists all.",
)
@click.option("--priority", type=click.Choice(CLASSES), help="The class. Default: the highest that you may have.")
def run(
    settings: Settings,
    model: str,
    prompt: tuple[str, ...],
    system: str,
    chosen: tuple[str, ...],
    priority: Class | None,
) -> None:
    """Talk to MODEL, which is loaded first if need be.

    With PROMPT, or with text on stdin, it prints one answer and ends. With both, the text follows the prompt.
    """
    from djinnctl.chat import loop
    from djinnctl.chat.dialog import Dialog
    from djinnctl.chat.settings import Settings as ChatSettings

    chat_settings = ChatSettings(system=system)
    for setting in chosen:
        name, _, value = setting.partition("=")
        try:
            chat_settings.set(name, value)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--set") from error
    text = "\n\n".join(filter(None, (" ".join(prompt), _piped())))
    if not text and not sys.stdin.isatty():
        raise click.UsageError("there is nothing to say: give a prompt, or text on stdin")
    if not text and settings.json:
        raise click.UsageError("--json prints one answer: give a prompt, or text on stdin")
    with settings.client():
        pass  # a daemon answers; from here on loading the model takes time, and shows its progress
    dialog = Dialog(model, chat_settings, priority=priority, address=settings.address, token=settings.token)
    try:
        if not text:
            loop.talk(dialog)
        elif settings.json:
            settings.tell(loop.ask(dialog, text, io.StringIO()), "")
        else:
            loop.ask(dialog, text)
    finally:
        dialog.close()


def _piped() -> str:
    """The text that comes through a pipe or from a file. Anything else on stdin is not read: it might never end."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    return sys.stdin.buffer.read().decode(errors="replace").strip()  # a diff may have bytes that are no UTF-8
