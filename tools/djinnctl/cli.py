"""`djinnctl`: the commands together, and how an error ends one."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import click

from djinn_client import ConnectionLost, DjinnError, __version__
from djinnctl.command import EXIT_CODES, FAILED, UNREACHABLE, everywhere
from djinnctl.commands import adapters, completion, daemon, memory, models, prefixes, run, sessions, tokens, trust


class Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DjinnError as error:
            path = str(error.data.get("path", ""))  # of a folder that cannot be opened: the message is the same for all
            told = error.message if path in error.message else f"{path}: {error.message}"
            click.echo(f"djinnctl: {told}", err=True)
            ctx.exit(UNREACHABLE if isinstance(error, ConnectionLost) else FAILED)

    def main(self, *args: Any, **extra: Any) -> Any:
        """An OSError that names no file comes from writing to stdout. (Click itself ends where a pipe's reader has
        gone.)"""
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.filename is not None:
                raise
            click.echo(f"djinnctl: the output cannot be written: {error.strerror or error}", err=True)
            with suppress(OSError):
                sys.stdout.close()  # or Python tries to write the rest, and says so
            sys.exit(FAILED)


@click.group(cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(version)s")
@everywhere
def main() -> None:
    """Manage djinnd: its models, its sessions, its health, and the machine it runs on."""


for command in (
    *(daemon.status, daemon.top, daemon.quota, daemon.trace, daemon.restart, daemon.version, daemon.doctor),
    run.run,
    *(models.models, models.pull, models.load, models.plan, models.unload),
    *(memory.budget, memory.free),
    *(sessions.ps, sessions.close, sessions.pause, sessions.resume, sessions.nice, sessions.why, sessions.fork),
    adapters.adapters,
    prefixes.prefix,
    tokens.token,
    trust.trust,
    completion.completion,
):
    main.add_command(command)
