"""Public prefixes: `djinnctl prefix`."""

from __future__ import annotations

import click

from djinn_client import Client
from djinnctl import render
from djinnctl.command import EXIT_CODES, Settings, command, everywhere
from djinnctl.commands.completion import complete_session
from djinnctl.units import MOST


@click.group(epilog=EXIT_CODES)
@everywhere
def prefix() -> None:
    """Prefixes whose pages the sessions of all users share. For administrators."""


@command(of=prefix)
@click.argument("session", shell_complete=complete_session)
@click.option("--tokens", type=click.IntRange(1, MOST), metavar="N", help="The first N tokens. Default: all it has.")
def publish(settings: Settings, session: str, tokens: int | None) -> None:
    """Make the beginning of SESSION public, as far as it fills pages.

    Other users can find out that text, so it must not be secret: see docs/guide/sessions.md.
    """
    settings.show(lambda client: client.publish_prefix(session, tokens), render.published)


@command("list", of=prefix)
def list_prefixes(settings: Settings) -> None:
    """List the public prefixes.

    It shows the model and the length of each, the administrator who has published it, and when.
    """
    settings.show(Client.prefixes, render.prefixes)


@command(of=prefix)
@click.argument("prefix")
def withdraw(settings: Settings, prefix: str) -> None:
    """Withdraw the public PREFIX. A model that is loaded goes on sharing it until it is loaded the next time."""
    with settings.client() as client:
        in_force = client.withdraw_prefix(prefix)
    settings.tell({"withdrawn": prefix, "in_force": in_force}, render.withdrawn(prefix, in_force))
