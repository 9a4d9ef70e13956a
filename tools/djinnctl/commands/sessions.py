"""Sessions, by their ids."""

from __future__ import annotations

import sys
from functools import partial
from typing import Literal

import click

from djinn_client import Client, Session, SessionNotFound
from djinn_client.protocol import CLASSES, Class
from djinnctl import explain, render
from djinnctl.command import FAILED, Settings, command
from djinnctl.commands.completion import complete_session
from djinnctl.options import watch_option


@command()
@watch_option
def ps(settings: Settings, watch: float | None) -> None:
    """List your sessions, or for an administrator those of all users.

    DEVICE, HOST and DISK count a session's pages there, BYTES is what they take. A shared page counts for each session.
    """
    settings.show(Client.sessions, render.sessions, every_s=watch)


@command()
@click.argument("sessions", nargs=-1, required=True, metavar="SESSION...", shell_complete=complete_session)
def close(settings: Settings, sessions: tuple[str, ...]) -> None:
    """Close sessions by their ids. Exit 1 if one does not exist."""
    closed, missing = [], []
    with settings.client() as client:
        for session in sessions:
            try:
                client.close_session(session)
                closed.append(session)
            except SessionNotFound:
                missing.append(session)
    lines = [f"closed {session}" for session in closed] + [f"no session {session}" for session in missing]
    settings.tell({"closed": closed, "missing": missing}, "\n".join(lines))
    if missing:
        sys.exit(FAILED)


@command()
@click.argument("session", shell_complete=complete_session)
@click.option("--to", "tier", type=click.Choice(["host", "disk"]), default="host", show_default=True, help="The tier.")
def pause(settings: Settings, session: str, tier: Literal["host", "disk"]) -> None:
    """Stop SESSION and move its pages off the device.

    A session may be stopped in the middle of a call. The caller's stream stays open and goes on at `djinnctl resume`. A
    restart of the daemon ends the pause."""
    settings.show(lambda client: client.pause_session(session, tier), partial(render.paused, session))


@command()
@click.argument("session", shell_complete=complete_session)
def resume(settings: Settings, session: str) -> None:
    """Let SESSION go on from where `djinnctl pause` stopped it."""
    with settings.client() as client:
        client.unpause_session(session)
    settings.tell({"resumed": session}, f"resumed {session}")


@command()
@click.argument("session", shell_complete=complete_session)
@click.argument("priority", type=click.Choice(CLASSES), metavar="CLASS")
def nice(settings: Settings, session: str, priority: Class) -> None:
    """Give SESSION another CLASS: interactive, agent or batch. A call that runs on it goes on in that class."""
    with settings.client() as client:
        client.set_priority(session, priority)
    settings.tell({"session": session, "priority": priority}, f"{session} is {priority}")


@command()
@watch_option
@click.argument("session", shell_complete=complete_session)
def why(settings: Settings, watch: float | None, session: str) -> None:
    """Show why SESSION runs or waits.

    It shows the reason with its figures, and the sessions that go first.
    """
    settings.show(lambda client: client.why(session), partial(explain.told, session), every_s=watch)


@command()
@click.argument("session", shell_complete=complete_session)
def fork(settings: Settings, session: str) -> None:
    """Fork SESSION and print the id of the new session. SESSION must be yours and idle.

    `djinn_client.Session.attach` takes the new session up, within limits.session_grace.
    """
    with settings.patience():
        parent = Session.attach(session, address=settings.address, token=settings.token)
    forked = parent.fork()
    for each in (forked, parent):
        each.detach()
    settings.tell({"session": forked.id, "parent": session}, forked.id)
