"""Tokens: `djinnctl token`."""

from __future__ import annotations

import click

from djinn_client.protocol import CLASSES, Class
from djinnctl.command import EXIT_CODES, Settings, everywhere, pass_settings
from djinnctl.options import read_seconds


@click.group(epilog=EXIT_CODES)
@everywhere
def token() -> None:
    """Tokens, by which programs and people without a Unix user here are known. For administrators."""


@token.command(epilog=EXIT_CODES)
@everywhere
@click.argument("name")
@click.option("--user", default="", metavar="UNIXUSER", help="The token is this Unix user's. Default: NAME's own.")
@click.option(
    "--class", "highest_class", type=click.Choice(CLASSES), help="The highest class that it may use. Default: any."
)
@click.option("--expires", callback=read_seconds, metavar="TIME", help="When it ends, as 90d from now. Default: never.")
@pass_settings
def add(settings: Settings, name: str, user: str, highest_class: Class | None, expires: float | None) -> None:
    """Add a token called NAME, and print it. It is shown this once: the daemon keeps its hash only."""
    from djinnctl import screen, tokens

    with settings.client() as client:
        added = client.add_token(name, user=user, highest_class=highest_class, expires_s=expires or 0.0)
    screen.show(lambda: added, tokens.added, as_json=settings.json)


@token.command("list", epilog=EXIT_CODES)
@everywhere
@pass_settings
def list_tokens(settings: Settings) -> None:
    """List the tokens: for whom, up to which class, since and until when, and when each was last used."""
    from djinnctl import screen, tokens

    with settings.client() as client:
        screen.show(client.tokens, tokens.table, as_json=settings.json)


@token.command(epilog=EXIT_CODES)
@everywhere
@click.argument("name")
@pass_settings
def revoke(settings: Settings, name: str) -> None:
    """Revoke the token called NAME, and close the connections with it. Its sessions stay for limits.session_grace."""
    from djinnctl import screen

    with settings.client() as client:
        client.revoke_token(name)
    screen.show(lambda: {"revoked": name}, lambda _: f"{name} is revoked", as_json=settings.json)
