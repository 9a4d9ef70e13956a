"""Checkpoints from the hub, in a folder of the caller's. The library huggingface_hub fetches them, with the caller's
own rights and token. What has come of a broken download is kept, and the next one goes on from there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from djinn_client.pulled import is_hub_id

# The files of a checkpoint that djinnd reads, as the daemon fetches them itself: no pickles, no code.
FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]
_INSTALL = "pull needs the library huggingface_hub: pip install 'djinn-client[hub]'"


def pull(hub_id: str, folder: Path, revision: str | None = None) -> Path:
    """Fetches what is not there yet, with a bar on a terminal; the checkpoint's folder, below `folder`.

    Raises click.ClickException for a name that is no hub id, and with the library's account of what went wrong."""
    if not is_hub_id(hub_id):
        raise click.UsageError(f"{hub_id!r} is no hub id: they read org/name")
    if not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when the library is imported
    try:
        import huggingface_hub
    except ImportError as error:
        raise click.ClickException(_INSTALL) from error
    target = folder / hub_id
    try:
        target.mkdir(parents=True, exist_ok=True)
        huggingface_hub.snapshot_download(hub_id, revision=revision, local_dir=target, allow_patterns=FILES)
    except Exception as error:  # network, licence, disk, name: the library has its own account of each
        raise click.ClickException(f"{hub_id} could not be fetched: {error}") from error
    if not (target / "config.json").is_file():
        raise click.ClickException(f"{hub_id} is no checkpoint that djinnd can read: it has no config.json")
    return target
