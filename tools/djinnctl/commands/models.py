"""Models: which there are, where their blocks would go, and loading them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from djinn_client import Client
from djinn_client.admin.loading_line import loading_line
from djinn_client.files.pulled import models_folder
from djinnctl import pulling, render
from djinnctl.command import Settings, command
from djinnctl.commands.completion import complete_model
from djinnctl.options import SOME_SIZE, TIME, kv_option, placing_options, tier_options, watch_option

if TYPE_CHECKING:
    from typing import Unpack

    from djinn_client import PlacingOptions


@command()
@watch_option
def models(settings: Settings, watch: float | None) -> None:
    """List the models, loaded or available."""
    settings.show(Client.models, render.models, every_s=watch)


@command()
@click.argument("hub_id", metavar="ID")
@click.option(
    "--to", "folder", metavar="FOLDER", type=click.Path(path_type=Path), help="The folder below which to put it."
)
@click.option("--revision", metavar="NAME", help="A branch, a tag or a commit. Default: the newest.")
def pull(settings: Settings, hub_id: str, folder: Path | None, revision: str | None) -> None:
    """Fetch the model ID (org/name) from the hub. After a broken download, the same command fetches the rest.

    Needs no daemon. The model is fetched with your rights and your hub token, into $DJINN_MODELS or
    ~/.local/share/djinnd/models, where your sessions and commands find it by its id.
    """
    below = folder or models_folder()
    target = pulling.pull(hub_id, below, revision)
    settings.tell({"folder": str(target)}, pulling.told(hub_id, target, is_found=below == models_folder()))


@command()
@click.argument("model", shell_complete=complete_model)
@kv_option
@tier_options
@placing_options
@click.option("--keep-host/--no-keep-host", default=None, help="Keep a copy on the host when all blocks are resident.")
@click.option(
    "--keep-alive",
    type=TIME,
    help="After this time without a call, such as 5min, it gives its device memory back until the next one; 0: never. "
    "Also for a model that is loaded. Default: as configured.",
)
@click.option(
    "--chat-template",
    type=click.File(),
    metavar="FILE",
    help="The template of its chats (jinja). Default: the configuration's, else the checkpoint's.",
)
def load(
    settings: Settings,
    model: str,
    kv: int | None,
    host_kv: int | None,
    disk_kv: int | None,
    keep_alive: float | None,
    chat_template: TextIO | None,
    **placing: Unpack[PlacingOptions],
) -> None:
    """Load MODEL, so that sessions of it begin at once.

    MODEL is a name that `models` lists, a folder with a checkpoint, or a hub id. The configuration says where its
    blocks go. With one of --resident, --ring-gb, --slots, --packing or --keep-host, the others of these have their own
    defaults."""
    with settings.client() as client, nullcontext() if settings.json else loading_line(None) as on_progress:
        info = client.load(
            model,
            kv_bytes=kv or 0,
            host_kv_bytes=host_kv,
            disk_kv_bytes=disk_kv,
            keep_alive_s=keep_alive,
            chat_template=chat_template.read() if chat_template else "",
            on_progress=on_progress,
            **placing,
        )
    settings.tell(info, render.loaded(info))


@command()
@click.argument("model", shell_complete=complete_model)
@click.option(
    "--memory",
    type=SOME_SIZE,
    help="Plan for this much device memory, without other models. Default: now, beside the loaded ones.",
)
@kv_option
@placing_options
def plan(settings: Settings, model: str, memory: int | None, kv: int | None, **placing: Unpack[PlacingOptions]) -> None:
    """Show the memory that MODEL would take, and its speed.

    It shows where the blocks would go if MODEL were loaded now, and loads nothing.
    """
    settings.show(lambda client: client.plan(model, memory_bytes=memory or 0, kv_bytes=kv or 0, **placing), render.plan)


@command()
@click.argument("model", shell_complete=complete_model)
@click.option("--force", is_flag=True, help="Close the sessions that use it.")
def unload(settings: Settings, model: str, force: bool) -> None:
    """Unload MODEL and free its memory."""
    with settings.client() as client:
        client.unload(model, force=force)
    settings.tell({"unloaded": model}, f"unloaded {model}")
