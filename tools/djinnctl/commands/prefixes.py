"""Public prefixes: `djinnctl prefix`."""

from __future__ import annotations

import click

from djinnctl.command import EXIT_CODES, Settings, everywhere, pass_settings
from djinnctl.units import MOST


@click.group(epilog=EXIT_CODES)
@everywhere
def prefix() -> None:
    """Prefixes that the sessions of all users share pages of. For administrators."""


@prefix.command(epilog=EXIT_CODES)
@everywhere
@click.argument("session")
@click.option("--tokens", type=click.IntRange(1, MOST), metavar="N", help="The first N tokens. Default: all it has.")
@pass_settings
def publish(settings: Settings, session: str, tokens: int | None) -> None:
    """Make the beginning of SESSION public, as far as it fills pages.

    What it says must not be secret: see docs/sessions.md.
    """
    from djinnctl import render, screen

    with settings.client() as client:
        screen.show(lambda: client.publish_prefix(session, tokens), render.published, as_json=settings.json)


@prefix.command("list", epilog=EXIT_CODES)
@everywhere
@pass_settings
def list_prefixes(settings: Settings) -> None:
    """List the public prefixes: of which model, how long, marked by whom and when."""
    from djinnctl import render, screen

    with settings.client() as client:
        screen.show(client.prefixes, render.prefixes, as_json=settings.json)


@prefix.command(epilog=EXIT_CODES)
@everywhere
@click.argument("prefix")
@pass_settings
def withdraw(settings: Settings, prefix: str) -> None:
    """Withdraw the public PREFIX. A model that is loaded goes on sharing it until it is loaded the next time."""
    from djinnctl import render, screen

    with settings.client() as client:
        in_force = client.withdraw_prefix(prefix)
    done = {"withdrawn": prefix, "in_force": in_force}
    screen.show(lambda: done, lambda _: render.withdrawn(prefix, in_force), as_json=settings.json)
