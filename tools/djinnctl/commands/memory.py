"""The device memory that the daemon has."""

from __future__ import annotations

import click

from djinn_client import Retry
from djinnctl.command import EXIT_CODES, Settings, everywhere, pass_settings
from djinnctl.options import read_size


@click.command(epilog=EXIT_CODES)
@everywhere
@click.argument("memory", callback=read_size, required=False, metavar="[SIZE]")
@pass_settings
def budget(settings: Settings, memory: int | None) -> None:
    """Show the daemon's device memory, or change it to SIZE.

    SIZE is as 16GiB. Sessions go on: blocks that no longer fit stream from the host, and become resident again when
    there is more memory. To change it is for administrators.
    """
    from djinnctl import render

    if memory is None:
        settings.show(lambda client: client.status().devices, render.devices)
    else:
        settings.show(lambda client: client.set_budget(memory), render.budget)


@click.command(epilog=EXIT_CODES)
@everywhere
@click.argument("memory", callback=read_size, metavar="SIZE")
@pass_settings
def free(settings: Settings, memory: int) -> None:
    """Take SIZE of device memory from the daemon, for other programs.

    SIZE is as 20GiB, and the daemon's budget becomes smaller by it. Sessions go on: pages leave the device, and blocks
    that no longer fit stream. Prints the command that gives the memory back.
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
