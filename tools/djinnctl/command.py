"""What every command has: two options, before its name or after it, and the exit codes that it ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from djinn_client import Client

F = TypeVar("F", bound=Callable[..., Any])

DONE, FAILED, UNREACHABLE = 0, 1, 2

EXIT_CODES = """\b
Exit codes:
  0  done
  1  the daemon answered with an error, or a check failed
  2  wrong usage, or no daemon to be reached
"""


@dataclass
class Settings:
    """The options that every command takes, before its name or after it."""

    address: str | None = None
    json: bool = False

    def client(self) -> Client:
        return Client(self.address)


pass_settings = click.make_pass_decorator(Settings, ensure=True)


def everywhere(command: F) -> F:
    for option in (
        click.option("--json", is_flag=True, expose_value=False, callback=_remember, help="Print JSON, for programs."),
        click.option(
            "--address",
            metavar="PATH",
            expose_value=False,
            callback=_remember,
            help="The daemon's socket. Default: $DJINND_ADDRESS, the system's, then yours.",
        ),
    ):
        command = option(command)
    return command


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value:
        setattr(ctx.ensure_object(Settings), str(param.name), value)
