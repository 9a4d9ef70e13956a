"""The common part of all commands: three options, before the name or after it, and the exit codes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from djinn_client import Client
from djinn_client.transport.address import ENVIRONMENT, candidates, without_token
from djinnctl import screen
from djinnctl.layout import Renderable

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

DONE, FAILED, UNREACHABLE = 0, 1, 2
SILENCE_S = 5.0  # after which a line says what the command waits for

EXIT_CODES = """\b
Exit codes:
  0  done
  1  the daemon answered with an error, or a check failed
  2  wrong usage, or no daemon to be reached
"""


@contextmanager
def after_silence(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell`, in a thread, if the block takes longer than SILENCE_S."""
    timer = threading.Timer(SILENCE_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class Settings:
    """The options that every command takes, before its name or after it."""

    address: str | None = None
    token: str | None = None
    json: bool = False

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A client that the daemon has answered. Raises ConnectionLost."""
        with Client(self.address, token=self.token) as client:
            with self.patience():
                client.welcome()
            yield client

    def show(
        self, read: Callable[[Client], T], render: Callable[[T], Renderable], *, every_s: float | None = None
    ) -> T:
        """Shows what `read` has from the daemon, and returns it: see screen.show. Raises ConnectionLost."""
        with self.client() as client:
            return screen.show(lambda: read(client), render, as_json=self.json, every_s=every_s)

    def tell(self, done: object, shown: Renderable) -> None:
        """Prints what was done: as `shown` to people, or `done` as JSON."""
        screen.show(lambda: done, lambda _: shown, as_json=self.json)

    def patience(self) -> AbstractContextManager[None]:
        """Says once that the daemon has not answered, if the block takes longer than SILENCE_S. The block goes on."""
        return after_silence(self._tell_of_silence)

    def _tell_of_silence(self) -> None:
        given = without_token(self.address or os.environ.get(ENVIRONMENT, "") or "the default address")
        paths = " or ".join(filter(os.path.exists, candidates(self.address))) or given
        silence = f"the daemon at {paths} has not answered for {SILENCE_S:g} s"
        click.echo(f"djinnctl: {silence}: waiting; Ctrl-C, or see `djinnctl doctor`", err=True)


def command(
    name: str | None = None, *, of: click.Group | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a function a command, of djinnctl or of a group. The function gets the Settings and the values of its own
    options; the command takes the options of all commands too. Without a name it has the function's."""
    make, pass_settings = click.command if of is None else of.command, click.make_pass_decorator(Settings, ensure=True)
    return lambda function: make(name, epilog=EXIT_CODES)(everywhere(pass_settings(function)))


def everywhere(command: F) -> F:
    for option in (
        click.option("--json", is_flag=True, expose_value=False, callback=_remember, help="Print JSON, for programs."),
        click.option(
            "--address",
            metavar="ADDRESS",
            expose_value=False,
            callback=_remember,
            help="The daemon's socket, or another machine's: djinns://HOST, or a name. Default: $DJINND_ADDRESS, your "
            "hosts' default, the system's socket, then yours.",
        ),
        click.option(
            "--token-file",
            "token",
            metavar="FILE",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            expose_value=False,
            callback=_remember_token,
            help="A file with your token, which only you may read. Default: the token of the address, $DJINND_TOKEN.",
        ),
    ):
        command = option(command)
    return command


def _remember_token(ctx: click.Context, param: click.Parameter, file: Path | None) -> None:
    """There is no option for the token itself: all users of a machine can read the arguments of its processes."""
    if file is None:
        return
    try:
        if file.stat().st_mode & 0o077:
            raise click.BadParameter(f"others may read {file}: chmod 600 {file}", ctx, param)
        _remember(ctx, param, file.read_text().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{file} cannot be read: {error}", ctx, param) from error


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value:
        setattr(ctx.ensure_object(Settings), str(param.name), value)
