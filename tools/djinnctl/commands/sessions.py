"""Sessions, by their ids."""

from __future__ import annotations

import sys
from typing import Literal

import click

from djinn_client import SessionNotFound, attach
from djinn_client.protocol import CLASSES, Class
from djinnctl.command import EXIT_CODES, FAILED, Settings, everywhere, pass_settings
from djinnctl.options import watch_option


@click.command(epilog=EXIT_CODES)
@everywhere
@watch_option
@pass_settings
def ps(settings: Settings, watch: float | None) -> None:
    """List the sessions: yours, or everybody's for an administrator.

    DEVICE, HOST and DISK are its pages there, BYTES what they take; those that sessions share count for each.
    """
    from djinnctl import render, screen

    with settings.client() as client:
        screen.show(client.sessions, render.sessions, as_json=settings.json, every_s=watch)


@click.command(epilog=EXIT_CODES)
@everywhere
@click.argument("sessions", nargs=-1, required=True, metavar="SESSION...")
@pass_settings
def close(settings: Settings, sessions: tuple[str, ...]) -> None:
    """Close sessions by their ids; exit 1 where one does not exist."""
    from djinnctl import screen

    closed, missing = [], []
    with settings.client() as client:
        for session in sessions:
            try:
                client.close_session(session)
                closed.append(session)
            except SessionNotFound:
                missing.append(session)
    lines = [f"closed {session}" for session in closed] + [f"no session {session}" for session in missing]
    screen.show(lambda: {"closed": closed, "missing": missing}, lambda _: "\n".join(lines), as_json=settings.json)
    if missing:
        sys.exit(FAILED)


@click.command(epilog=EXIT_CODES)
@everywhere
@click.argument("session")
@click.option("--to", "tier", type=click.Choice(["host", "disk"]), default="host", show_default=True, help="Where to.")
@pass_settings
def pause(settings: Settings, session: str, tier: Literal["host", "disk"]) -> None:
    """Stop SESSION, in the middle of a call too, and move its pages off the device.

    Its caller's stream stays open, and goes on at `djinnctl resume`. A restart of the daemon ends the pause.
    """
    from djinnctl import render, screen

    with settings.client() as client:
        reply = client.pause_session(session, tier)
    screen.show(lambda: reply, lambda _: render.paused(session, reply), as_json=settings.json)


@click.command(epilog=EXIT_CODES)
@everywhere
@click.argument("session")
@pass_settings
def resume(settings: Settings, session: str) -> None:
    """Let SESSION go on from where `djinnctl pause` stopped it."""
    from djinnctl import screen

    with settings.client() as client:
        client.resume_session(session)
    screen.show(lambda: {"resumed": session}, lambda _: f"resumed {session}", as_json=settings.json)


@click.command(epilog=EXIT_CODES)
@everywhere
@click.argument("session")
@click.argument("priority", type=click.Choice(CLASSES), metavar="CLASS")
@pass_settings
def nice(settings: Settings, session: str, priority: Class) -> None:
    """Give SESSION another CLASS: interactive, agent or batch. What runs on it goes on in that class."""
    from djinnctl import screen

    with settings.client() as client:
        client.set_priority(session, priority)
    done = {"session": session, "priority": priority}
    screen.show(lambda: done, lambda _: f"{session} is {priority}", as_json=settings.json)


@click.command(epilog=EXIT_CODES)
@everywhere
@watch_option
@click.argument("session")
@pass_settings
def why(settings: Settings, watch: float | None, session: str) -> None:
    """Show why SESSION is running, or not: the reason with its figures, and which sessions go first."""
    from djinnctl import explain, screen

    with settings.client() as client:
        screen.show(
            lambda: client.why(session),
            lambda told: explain.told(session, told),
            as_json=settings.json,
            every_s=watch,
        )


@click.command(epilog=EXIT_CODES)
@everywhere
@click.argument("session")
@pass_settings
def fork(settings: Settings, session: str) -> None:
    """Fork SESSION, which must be yours and idle, and print the new one's id.

    Nobody is attached to it: `djinn_client.attach` takes it up, within the daemon's grace time.
    """
    from djinnctl import screen

    with settings.patience():
        parent = attach(session, address=settings.address)
    forked = parent.fork()
    for each in (forked, parent):
        each.detach()
    screen.show(lambda: {"session": forked.id, "parent": session}, lambda _: forked.id, as_json=settings.json)
