"""The daemon as a whole, and the machine that it runs on."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from djinn_client import DjinnError, __version__
from djinn_client.protocol import VERSION
from djinnctl import chrome_trace, quotas, render, screen
from djinnctl import restart as restarting
from djinnctl import top as glances
from djinnctl.command import FAILED, Settings, command
from djinnctl.options import watch_option


@command()
@watch_option
@click.option("--check", is_flag=True, help="Audit the daemon's pools too; exit 1 with what was found.")
def status(settings: Settings, watch: float | None, check: bool) -> None:
    """Show the daemon, its devices and its models."""
    reply = settings.show(lambda client: client.status(check=check), render.status, every_s=watch)
    if reply.integrity:
        sys.exit(FAILED)
    if check and not settings.json:
        click.echo("check: consistent")


@command()
@click.option("--once", is_flag=True, help="Show it once, as when the output is no terminal.")
def top(settings: Settings, once: bool) -> None:
    """Watch the devices, the pages and the busiest sessions.

    It shows them every second, until Ctrl-C.
    """
    every_s = 1.0 if sys.stdout.isatty() and not once else None
    with settings.client() as client:
        screen.show(glances.Reader(client), glances.show, as_json=settings.json, every_s=every_s)


@command()
@watch_option
@click.option("--all", "of_all", is_flag=True, help="Show every user that has a session. For administrators.")
def quota(settings: Settings, watch: float | None, of_all: bool) -> None:
    """Show your quotas and your use of them.

    RULE is the rule of the daemon's configuration that applies.
    """
    settings.show(lambda client: client.quotas(all=of_all), quotas.table, every_s=watch)


@command()
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("trace.json"),
    show_default=True,
    help="The file to write.",
)
@click.option("--steps", type=click.IntRange(1, 100), default=4, show_default=True, help="Steps to record.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="The longest time to record, up to 60.")
def trace(settings: Settings, output: Path, steps: int, seconds: float) -> None:
    """Record the device's next steps as a timeline.

    It shows when the device computed and copied each block, in Chrome's trace format, which Perfetto reads. For
    administrators.
    """
    try:
        with chrome_trace.writable(output), settings.client() as client:
            reply = client.trace(steps=steps, seconds=seconds)
            chrome_trace.write(reply, output)
    except OSError as error:
        raise click.FileError(str(output), error.strerror) from error
    summary = chrome_trace.summary(reply, output)
    settings.tell(summary, chrome_trace.told(summary))


@command()
@click.option("--warm", is_flag=True, help="Keep the loaded models in shared memory, and load them again from there.")
def restart(settings: Settings, warm: bool) -> None:
    """Restart the daemon; it reads its configuration again.

    The daemon finishes what runs and starts again as the same process. Sessions survive it: attach to them within
    limits.session_grace. Returns when the daemon serves again; clients that connect meanwhile wait. For administrators.
    """
    settings.show(partial(restarting.restart, warm=warm), restarting.render)


@command()
def version(settings: Settings) -> None:
    """Show the versions of djinnctl, the protocol and the daemon."""
    daemon, why = None, ""
    try:
        with settings.client() as client:
            daemon = client.welcome().version
    except DjinnError as error:
        why = error.message
    versions = {"djinnctl": __version__, "protocol": VERSION, "djinnd": daemon}
    text = f"djinnctl {__version__}, protocol {VERSION}\ndjinnd {daemon or f'unknown: {why}'}"
    settings.tell(versions, text)


@command()
@click.option("--fix", is_flag=True, help="Remove shared memory that a daemon which is gone has left.")
def doctor(settings: Settings, fix: bool) -> None:
    """Examine this machine, and say what is wrong and what to do.

    It looks at software, GPU, memory, socket, and what a dead daemon has left. Run it as the user and in the container
    that djinnd runs in; it needs no daemon.

    With the address of another machine it looks at the connection, the certificate, the token and the daemon's answer.
    """
    from djinnctl import doctor as examination

    results = examination.examine(address=settings.address, token=settings.token, fix=fix)
    settings.tell(results, examination.render(results))
    if any(result.state == "fail" for result in results):
        sys.exit(FAILED)
