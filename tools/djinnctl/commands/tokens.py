"""Tokens: `djinnctl token`."""

from __future__ import annotations

import click

from djinn_client import Client
from djinn_client.protocol import CLASSES, Class
from djinn_client.transport.remote.hosts import SCHEME, parse
from djinnctl import render
from djinnctl.command import EXIT_CODES, Settings, command, everywhere
from djinnctl.commands.trust import certificate_at
from djinnctl.options import SOME_TIME


@click.group(epilog=EXIT_CODES)
@everywhere
def token() -> None:
    """Tokens for programs, and for people without a Unix user here. For administrators."""


@command(of=token)
@click.argument("name")
@click.option("--user", default="", metavar="UNIXUSER", help="The token stands for this Unix user. Default: for NAME.")
@click.option(
    "--class", "highest_class", type=click.Choice(CLASSES), help="The highest class that it may use. Default: any."
)
@click.option("--expires", type=SOME_TIME, help="Its lifetime, such as 90d. Default: unlimited.")
@click.option(
    "--url", metavar="HOST[:PORT]", help="Print an address for other machines: HOST, the token, and the fingerprint."
)
def add(
    settings: Settings, name: str, user: str, highest_class: Class | None, expires: float | None, url: str | None
) -> None:
    """Add a token called NAME and print it. It is shown this once: the daemon keeps only its hash."""
    host = parse(f"{SCHEME}://{url}") if url else None
    trusted = host and host._replace(fingerprint=certificate_at(host))
    settings.show(
        lambda client: client.add_token(name, user=user, highest_class=highest_class, expires_s=expires or 0.0),
        # alone, so that a script can take it
        lambda reply: reply.token if trusted is None else trusted._replace(token=reply.token).url,
    )


@command("list", of=token)
def list_tokens(settings: Settings) -> None:
    """List the tokens.

    It shows the user and the highest class of each, and when it was added, ends and was last used.
    """
    settings.show(Client.tokens, render.tokens)


@command(of=token)
@click.argument("name")
def revoke(settings: Settings, name: str) -> None:
    """End the token called NAME and close the connections with it. Its sessions stay for limits.session_grace."""
    with settings.client() as client:
        client.revoke_token(name)
    settings.tell({"revoked": name}, f"{name} is revoked")
