"""The daemon as a whole, and the machine that it runs on."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import click

from djinn_client import DjinnError, __version__
from djinn_client.protocol import VERSION
from djinnctl.command import EXIT_CODES, FAILED, Settings, everywhere, pass_settings
from djinnctl.options import watch_option


@click.command(epilog=EXIT_CODES)
@everywhere
@watch_option
@click.option("--check", is_flag=True, help="Audit the daemon's pools too; exit 1 with what was found.")
@pass_settings
def status(settings: Settings, watch: float | None, check: bool) -> None:
    """Show the daemon, its devices and its models."""
    from djinnctl import render

    reply = settings.show(lambda client: client.status(check=check), render.status, every_s=watch)
    if reply.integrity:
        sys.exit(FAILED)
    if check and not settings.json:
        click.echo("check: consistent")


@click.command(epilog=EXIT_CODES)
@everywhere
@click.option("--once", is_flag=True, help="Show it once, as when the output is no terminal.")
@pass_settings
def top(settings: Settings, once: bool) -> None:
    """Watch the devices, the pages and the busiest sessions.

    It shows them every second, until Ctrl-C.
    """
    from djinnctl import screen
    from djinnctl import top as glances

    every_s = 1.0 if sys.stdout.isatty() and not once else None
    with settings.client() as client:
        screen.show(glances.Reader(client), glances.show, as_json=settings.json, every_s=every_s)


@click.command(epilog=EXIT_CODES)
@everywhere
@watch_option
@click.option("--all", "of_all", is_flag=True, help="Show every user that has a session. For administrators.")
@pass_settings
def quota(settings: Settings, watch: float | None, of_all: bool) -> None:
    """Show what you may have of the daemon, and what you use.

    RULE is the rule of the daemon's configuration that says it.
    """
    from djinnctl import quotas

    settings.show(lambda client: client.quotas(all=of_all), quotas.table, every_s=watch)


@click.command(epilog=EXIT_CODES)
@everywhere
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("trace.json"),
    show_default=True,
    help="The file to write.",
)
@click.option("--steps", type=click.IntRange(1, 100), default=4, show_default=True, help="Steps to record.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="When to end anyway, up to 60.")
@pass_settings
def trace(settings: Settings, output: Path, steps: int, seconds: float) -> None:
    """Record the device's next steps as a timeline.

    It shows when the device computed and copied each block, in Chrome's trace format, which Perfetto reads. For
    administrators.
    """
    from djinnctl import chrome_trace, screen

    try:
        with chrome_trace.writable(output), settings.client() as client:
            reply = client.trace(steps=steps, seconds=seconds)
            chrome_trace.write(reply, output)
    except OSError as error:
        raise click.FileError(str(output), error.strerror) from error
    screen.show(lambda: chrome_trace.summary(reply, output), chrome_trace.told, as_json=settings.json)


@click.command(epilog=EXIT_CODES)
@everywhere
@click.option("--warm", is_flag=True, help="Keep the loaded models in shared memory, and load them again from there.")
@pass_settings
def restart(settings: Settings, warm: bool) -> None:
    """Restart the daemon, with its configuration read anew.

    The daemon finishes what runs and starts again as the same process. Sessions survive it: attach to them within
    limits.session_grace. Returns when the daemon serves again; clients that connect meanwhile wait. For administrators.
    """
    from djinnctl import restart as restarting

    settings.show(partial(restarting.restart, warm=warm), restarting.render)


@click.command(epilog=EXIT_CODES)
@everywhere
@pass_settings
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


@click.command(epilog=EXIT_CODES)
@everywhere
@click.option("--fix", is_flag=True, help="Remove shared memory that a daemon which is gone has left.")
@pass_settings
def doctor(settings: Settings, fix: bool) -> None:
    """Examine this machine, and say what is wrong and what to do.

    It looks at software, GPU, memory, socket, and what a dead daemon has left. Run it as the user and in the container
    that djinnd runs in; it needs no daemon.
    """
    from djinnctl import doctor as examination
    from djinnctl import screen

    results = examination.examine(address=settings.address, fix=fix)
    shown = screen.show(lambda: results, examination.render, as_json=settings.json)
    if any(result.state == "fail" for result in shown):
        sys.exit(FAILED)
