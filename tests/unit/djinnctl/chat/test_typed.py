from __future__ import annotations

import pytest

from djinnctl.chat.typed import Command, Typed


def test_a_line_is_a_message() -> None:
    assert Typed().add("  hello there \n") == "hello there"
    assert Typed().add("   ") is None


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/help", Command("help", "")),
        ("/SET temperature 0.5", Command("set", "temperature 0.5")),
        ("  /save my talk.json ", Command("save", "my talk.json")),
        ("/", Command("", "")),
    ],
)
def test_a_slash_begins_a_command(line: str, command: Command) -> None:
    assert Typed().add(line) == command


def test_lines_between_triple_quotes_are_one_message() -> None:
    typed = Typed()
    assert typed.add('"""first') is None and typed.inside
    assert typed.add("  /bye is no command here") is None
    assert typed.add("") is None
    assert typed.add('x = """doc"""  # goes on') is None
    assert typed.add('last"""  ') == 'first\n  /bye is no command here\n\nx = """doc"""  # goes on\nlast'
    assert not typed.inside
    assert typed.add("next") == "next"


@pytest.mark.parametrize(("line", "message"), [('"""one line"""', "one line"), ('""""""', None)])
def test_opened_and_closed_in_one_line(line: str, message: str | None) -> None:
    typed = Typed()
    assert typed.add(line) == message
    assert not typed.inside


def test_an_open_message_can_be_dropped() -> None:
    typed = Typed()
    typed.add('"""never mind')
    typed.drop()
    assert typed.add("hello") == "hello"
