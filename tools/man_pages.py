"""Writes the man pages of djinnctl, of each of its commands, and of djinnd: `python -m tools.man_pages FOLDER`.

They follow from click's declarations, so they say what `--help` says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from djinnctl.cli import main as djinnctl
from djinnd import __version__
from djinnd.__main__ import main as djinnd


def pages() -> Iterator[tuple[str, str]]:
    """The name of each file, and its text."""
    yield "djinnd.8", _page(click.Context(djinnd, info_name="djinnd", **djinnd.context_settings), 8)
    yield from _with_commands(click.Context(djinnctl, info_name="djinnctl", **djinnctl.context_settings))


def _with_commands(context: click.Context) -> Iterator[tuple[str, str]]:
    """The page of a command and the pages of its own commands."""
    yield f"{_name(context)}.1", _page(context, 1)
    command = context.command
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from _with_commands(click.Context(each, info_name=name, parent=context))


def _page(context: click.Context, section: int) -> str:
    command = context.command
    summary, *paragraphs = (command.help or "").split("\n\n")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH {_name(context).upper()} {section} "" "djinnd {__version__}"',
        *(".SH NAME", f"{_name(context)} \\- {_text(summary)}"),
        *(".SH SYNOPSIS", f".B {context.command_path}", _text(usage)),
    ]
    if paragraphs:
        lines += [".SH DESCRIPTION", "\n.PP\n".join(map(_text, paragraphs))]
    options = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    records = [record for option in options if (record := option.get_help_record(context))]
    lines += _section("OPTIONS", records)
    if isinstance(command, click.Group):
        told = [(name, each.get_short_help_str(400)) for name, each in command.commands.items()]
        lines += _section("COMMANDS", told)
        lines += [f"Each has a page of its own, as {_name(context)}-{told[0][0]}(1)."]
    if command.epilog:
        lines += [".SH EXIT STATUS", ".nf", *map(_text, command.epilog.splitlines()[2:]), ".fi"]
    return "\n".join(lines) + "\n"


def _section(title: str, records: list[tuple[str, str]]) -> list[str]:
    return [f".SH {title}", *(line for name, told in records for line in (".TP", f".B {_text(name)}", _text(told)))]


def _name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _text(text: str) -> str:
    """The text in one line, in which nothing is a request of roff."""
    escaped = " ".join(text.replace("\b", "").split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
