"""`djinnctl`: the commands together, and how an error ends one."""

from __future__ import annotations

from typing import Any

import click

from djinn_client import ConnectionLost, DjinnError
from djinnctl.command import EXIT_CODES, FAILED, UNREACHABLE, everywhere
from djinnctl.commands import daemon, memory, models, prefixes, sessions


class Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DjinnError as error:
            click.echo(f"djinnctl: {error.message}", err=True)
            ctx.exit(UNREACHABLE if isinstance(error, ConnectionLost) else FAILED)


@click.group(cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@everywhere
def main() -> None:
    """Look after djinnd: its models, its sessions, its health, and the machine it runs on."""


for command in (
    *(daemon.status, daemon.top, daemon.quota, daemon.trace, daemon.restart, daemon.version, daemon.doctor),
    *(models.models, models.load, models.plan, models.unload),
    *(memory.budget, memory.free),
    *(sessions.ps, sessions.close, sessions.pause, sessions.resume, sessions.nice, sessions.why, sessions.fork),
    prefixes.prefix,
):
    main.add_command(command)
