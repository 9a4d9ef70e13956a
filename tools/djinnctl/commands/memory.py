"""The device memory that the daemon has."""

from __future__ import annotations

import click

from djinn_client import Client, OutOfMemory, Retry
from djinn_client.protocol import BudgetReply
from djinnctl import render
from djinnctl.command import Settings, command
from djinnctl.options import SIZE
from djinnctl.units import size


@command()
@click.argument("memory", type=SIZE, required=False, metavar="[SIZE]")
def budget(settings: Settings, memory: int | None) -> None:
    """Show the daemon's device memory, or change it to SIZE.

    SIZE is a size such as 16GiB. Sessions go on: blocks that no longer fit stream from the host, and become resident
    again when there is more memory. Only administrators may change it.
    """
    if memory is None:
        settings.show(lambda client: client.status().devices, render.devices)
    else:
        settings.show(lambda client: client.set_budget(memory), render.budget)


@command()
@click.argument("memory", type=SIZE, metavar="SIZE")
def free(settings: Settings, memory: int) -> None:
    """Take SIZE of device memory from the daemon, for other programs.

    SIZE is a size such as 20GiB; the daemon's budget shrinks by it. Sessions go on: pages leave the device, and blocks
    that no longer fit stream. Prints the command that gives the memory back.
    """
    with settings.client() as client:
        (device,) = client.status().devices
        if not device.budget_bytes:
            raise Retry("the engine is being started, and has no budget yet: try again in a moment")
        before = device.budget_bytes
        reply = _take(client, memory, before)
    settings.tell(reply, render.freed(reply, before))


def _take(client: Client, memory: int, budget: int) -> BudgetReply:
    """Lowers the budget by `memory`. Raises OutOfMemory with the memory that could be freed instead."""
    try:
        return client.set_budget(max(1, budget - memory))  # the engine refuses a budget of 1 byte with its own figure
    except OutOfMemory as error:
        needed = error.data.get("needed")
        if needed is None:
            raise
        loaded = [f"{model.name} ({model.sessions} sessions)" for model in client.models() if model.pages]
        raise OutOfMemory(
            f"nothing was freed: of the budget of {size(budget)}, the daemon needs {size(needed)} for "
            f"{', '.join(loaded) or 'the engine'}, and at most {size(max(0, budget - needed))} can be freed",
            **error.data,
        ) from error
