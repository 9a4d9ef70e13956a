"""LoRA adapters of models: `djinnctl adapters`."""

from __future__ import annotations

from contextlib import nullcontext

import click

from djinn_client import Client
from djinn_client.admin.loading_line import loading_line
from djinnctl import render
from djinnctl.command import EXIT_CODES, Settings, command, everywhere
from djinnctl.commands.completion import complete_model


@click.group(epilog=EXIT_CODES)
@everywhere
def adapters() -> None:
    """LoRA adapters, which sessions may have beside their model."""


@command("list", of=adapters)
def list_adapters(settings: Settings) -> None:
    """List the configured adapters, and those that you have used."""
    settings.show(Client.adapters, render.adapters)


@command("load", of=adapters)
@click.argument("model", shell_complete=complete_model)
@click.argument("adapter")
def load_adapter(settings: Settings, model: str, adapter: str) -> None:
    """Load ADAPTER, a PEFT folder or a configured name, for MODEL.

    Sessions load their adapter by themselves. This does it in advance, and shows the name for calls without a session.
    """
    with settings.client() as client, nullcontext() if settings.json else loading_line(None) as on_progress:
        info = client.load_adapter(model, adapter, on_progress=on_progress)
    settings.tell(info, render.adapter_loaded(info))


@command("unload", of=adapters)
@click.argument("model", shell_complete=complete_model)
@click.argument("adapter")
def unload_adapter(settings: Settings, model: str, adapter: str) -> None:
    """Free the memory of ADAPTER, by its name in the list. No session may use it."""
    with settings.client() as client:
        client.unload_adapter(model, adapter)
    settings.tell({"unloaded": adapter}, f"unloaded {adapter}")
