"""The commands. Each reads through djinn_client, shows what it read, and ends with the exit code of EXIT_CODES."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from djinn_client import Client, ConnectionLost, DjinnError, Retry, SessionNotFound, __version__, attach
from djinn_client.protocol import VERSION
from djinnctl.options import kv_option, placing_options, read_size, tier_options

if TYPE_CHECKING:
    from typing import Unpack

    from djinn_client import PlacingOptions

F = TypeVar("F", bound=Callable[..., Any])

DONE, FAILED, UNREACHABLE = 0, 1, 2

EXIT_CODES = """\b
Exit codes:
  0  done
  1  the daemon answered with an error, or a check failed
  2  wrong usage, or no daemon to be reached
"""


@dataclass
class Settings:
    """The options that every command takes, before its name or after it."""

    address: str | None = None
    json: bool = False

    def client(self) -> Client:
        return Client(self.address)


pass_settings = click.make_pass_decorator(Settings, ensure=True)


class Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DjinnError as error:
            click.echo(f"djinnctl: {error.message}", err=True)
            ctx.exit(UNREACHABLE if isinstance(error, ConnectionLost) else FAILED)


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value:
        setattr(ctx.ensure_object(Settings), str(param.name), value)


def everywhere(command: F) -> F:
    for option in (
        click.option("--json", is_flag=True, expose_value=False, callback=_remember, help="Print JSON, for programs."),
        click.option(
            "--address",
            metavar="PATH",
            expose_value=False,
            callback=_remember,
            help="The daemon's socket. Default: $DJINND_ADDRESS, the system's, then yours.",
        ),
    ):
        command = option(command)
    return command


watch = click.option(
    "--watch",
    metavar="[SECONDS]",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=2.0,
    default=None,
    help="Show it again every so many seconds (2), until Ctrl-C.",
)


@click.group(cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@everywhere
def main() -> None:
    """Look after djinnd: its models, its sessions, its health, and the machine it runs on."""


@main.command(epilog=EXIT_CODES)
@everywhere
@watch
@click.option("--check", is_flag=True, help="Audit the daemon's pools too; exit 1 with what was found.")
@pass_settings
def status(settings: Settings, watch: float | None, check: bool) -> None:
    """Show the daemon, its devices and its models."""
    from djinnctl import render, screen

    with settings.client() as client:
        reply = screen.show(lambda: client.status(check=check), render.status, as_json=settings.json, every_s=watch)
    if reply.integrity:
        sys.exit(FAILED)
    if check and not settings.json:
        click.echo("check: consistent")


@main.command(epilog=EXIT_CODES)
@everywhere
@watch
@pass_settings
def ps(settings: Settings, watch: float | None) -> None:
    """List the sessions: yours, or everybody's for an administrator.

    DEVICE, HOST and DISK are its pages there, BYTES what they take; those that sessions share count for each.
    """
    from djinnctl import render, screen

    with settings.client() as client:
        screen.show(client.sessions, render.sessions, as_json=settings.json, every_s=watch)


@main.command(epilog=EXIT_CODES)
@everywhere
@click.option("--once", is_flag=True, help="Show it once; so also where the output is no terminal.")
@pass_settings
def top(settings: Settings, once: bool) -> None:
    """Watch the daemon: devices, pages in each tier, and sessions, the busiest first. Every second, until Ctrl-C."""
    from djinnctl import screen
    from djinnctl import top as glances

    every_s = 1.0 if sys.stdout.isatty() and not once else None
    with settings.client() as client:
        screen.show(glances.Reader(client), glances.show, as_json=settings.json, every_s=every_s)


@main.command(epilog=EXIT_CODES)
@everywhere
@watch
@pass_settings
def models(settings: Settings, watch: float | None) -> None:
    """List the models, loaded or available."""
    from djinnctl import render, screen

    with settings.client() as client:
        screen.show(client.models, render.models, as_json=settings.json, every_s=watch)


@main.command(epilog=EXIT_CODES)
@everywhere
@click.argument("model")
@kv_option
@tier_options
@placing_options
@click.option("--keep-host/--no-keep-host", default=None, help="Keep a copy on the host when all blocks are resident.")
@pass_settings
def load(
    settings: Settings,
    model: str,
    kv: int | None,
    host_kv: int | None,
    disk_kv: int | None,
    **placing: Unpack[PlacingOptions],
) -> None:
    """Load MODEL: a name that `models` lists, a checkpoint's folder, or a hub id.

    Its blocks go where the configuration says, unless an option says otherwise; the other options then have their own
    defaults.
    """
    from djinnctl import render, screen

    with settings.client() as client, screen.loading_bar(hidden=settings.json) as on_progress:
        info = client.load(
            model,
            kv_bytes=kv or 0,
            host_kv_bytes=host_kv,
            disk_kv_bytes=disk_kv,
            on_progress=on_progress,
            **placing,
        )
    screen.show(lambda: info, render.loaded, as_json=settings.json)


@main.command(epilog=EXIT_CODES)
@everywhere
@click.argument("model")
@click.option("--memory", callback=read_size, metavar="SIZE", help="Device memory to plan for. Default: the budget.")
@kv_option
@placing_options
@pass_settings
def plan(settings: Settings, model: str, memory: int | None, kv: int | None, **placing: Unpack[PlacingOptions]) -> None:
    """Show where the blocks of MODEL would go, and how fast it would run. Loads nothing."""
    from djinnctl import render, screen

    with settings.client() as client:
        planned = client.plan(model, memory_bytes=memory or 0, kv_bytes=kv or 0, **placing)
    screen.show(lambda: planned, render.plan, as_json=settings.json)


@main.command(epilog=EXIT_CODES)
@everywhere
@click.argument("memory", callback=read_size, required=False, metavar="[SIZE]")
@pass_settings
def budget(settings: Settings, memory: int | None) -> None:
    """Give the daemon SIZE of device memory while sessions run, as 16GiB; without SIZE, show what it has.

    Blocks that no longer fit stream from the host, and become resident again when there is more.
    """
    from djinnctl import render, screen

    with settings.client() as client:
        if memory is None:
            screen.show(lambda: client.status().devices, render.devices, as_json=settings.json)
        else:
            screen.show(lambda: client.set_budget(memory), render.budget, as_json=settings.json)


@main.command(epilog=EXIT_CODES)
@everywhere
@click.argument("memory", callback=read_size, metavar="SIZE")
@pass_settings
def free(settings: Settings, memory: int) -> None:
    """Take SIZE of device memory from the daemon now, as 20GiB: its budget becomes smaller by that.

    Sessions go on: pages leave the device, and blocks that no longer fit stream. Prints how to give it back.
    """
    from djinnctl import render, screen

    with settings.client() as client:
        (device,) = client.status().devices
        if not device.budget_bytes:
            raise Retry("the engine is being started, and has no budget yet: try again in a moment")
        before = device.budget_bytes
        # To free more than all is to be refused with the engine's own figure of what can be freed.
        screen.show(
            lambda: client.set_budget(max(1, before - memory)),
            lambda reply: render.freed(reply, before),
            as_json=settings.json,
        )


@main.command(epilog=EXIT_CODES)
@everywhere
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("trace.json"),
    show_default=True,
    help="Where to write it.",
)
@click.option("--steps", type=int, default=4, show_default=True, help="Steps to record, up to 100.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="When to end anyway, up to 60.")
@pass_settings
def trace(settings: Settings, output: Path, steps: int, seconds: float) -> None:
    """Record the device's next steps: when it computed which block, and when it copied which.

    Writes them in Chrome's trace format, which Perfetto shows. For administrators.
    """
    from djinnctl import chrome_trace, screen

    with settings.client() as client:
        reply = client.trace(steps=steps, seconds=seconds)
    try:
        chrome_trace.write(reply, output)
    except OSError as error:
        raise click.FileError(str(output), error.strerror) from error
    screen.show(lambda: chrome_trace.summary(reply, output), chrome_trace.told, as_json=settings.json)


@main.command(epilog=EXIT_CODES)
@everywhere
@click.argument("model")
@click.option("--force", is_flag=True, help="Close the sessions that use it.")
@pass_settings
def unload(settings: Settings, model: str, force: bool) -> None:
    """Unload MODEL and free its memory."""
    from djinnctl import screen

    with settings.client() as client:
        client.unload(model, force=force)
    screen.show(lambda: {"unloaded": model}, lambda done: f"unloaded {model}", as_json=settings.json)


@main.command(epilog=EXIT_CODES)
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


@main.command(epilog=EXIT_CODES)
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


@main.command(epilog=EXIT_CODES)
@everywhere
@click.argument("session")
@pass_settings
def resume(settings: Settings, session: str) -> None:
    """Let SESSION go on from where `djinnctl pause` stopped it."""
    from djinnctl import screen

    with settings.client() as client:
        client.resume_session(session)
    screen.show(lambda: {"resumed": session}, lambda _: f"resumed {session}", as_json=settings.json)


@main.command(epilog=EXIT_CODES)
@everywhere
@click.argument("session")
@pass_settings
def fork(settings: Settings, session: str) -> None:
    """Fork SESSION, which must be yours and idle, and print the new one's id.

    Nobody is attached to it: `djinn_client.attach` takes it up, within the daemon's grace time.
    """
    from djinnctl import screen

    parent = attach(session, address=settings.address)
    forked = parent.fork()
    for each in (forked, parent):
        each.detach()
    screen.show(lambda: {"session": forked.id, "parent": session}, lambda _: forked.id, as_json=settings.json)


@main.group(epilog=EXIT_CODES)
@everywhere
def prefix() -> None:
    """Prefixes that the sessions of all users share pages of. For administrators."""


@prefix.command(epilog=EXIT_CODES)
@everywhere
@click.argument("session")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="The first N tokens. Default: all it has.")
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


@main.command(epilog=EXIT_CODES)
@everywhere
@click.option("--warm", is_flag=True, help="Keep the loaded models in shared memory, and load them again from there.")
@pass_settings
def restart(settings: Settings, warm: bool) -> None:
    """Have the daemon finish what runs, start again as the same process, and read its configuration anew.

    Sessions survive it: attach to them within limits.session_grace. Returns when the daemon serves again; clients that
    connect meanwhile wait. For administrators.
    """
    from djinnctl import restart as restarting
    from djinnctl import screen

    with settings.client() as client:
        screen.show(lambda: restarting.restart(client, warm=warm), restarting.render, as_json=settings.json)


@main.command(epilog=EXIT_CODES)
@everywhere
@pass_settings
def version(settings: Settings) -> None:
    """Show the versions of djinnctl, the protocol and the daemon, if one runs."""
    from djinnctl import screen

    daemon, why = None, ""
    try:
        with settings.client() as client:
            daemon = client.welcome().version
    except DjinnError as error:
        why = error.message
    versions = {"djinnctl": __version__, "protocol": VERSION, "djinnd": daemon}
    text = f"djinnctl {__version__}, protocol {VERSION}\ndjinnd {daemon or f'unknown: {why}'}"
    screen.show(lambda: versions, lambda _: text, as_json=settings.json)


@main.command(epilog=EXIT_CODES)
@everywhere
@click.option("--fix", is_flag=True, help="Remove shared memory that a daemon which is gone has left.")
@pass_settings
def doctor(settings: Settings, fix: bool) -> None:
    """Examine this machine: software, GPU, memory, socket, what a dead daemon left. Needs no daemon.

    Run it as the user and in the container that djinnd runs in.
    """
    from djinnctl import doctor as examination
    from djinnctl import screen

    results = examination.examine(address=settings.address, fix=fix)
    shown = screen.show(lambda: results, examination.render, as_json=settings.json)
    if any(result.state == "fail" for result in shown):
        sys.exit(FAILED)
