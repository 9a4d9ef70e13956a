"""Checkpoints from the hub, in a folder of the caller's. The library huggingface_hub fetches them, with the caller's
rights and hub token. It keeps what a broken download has brought, and the next one fetches the rest."""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import click

from djinn_client.files.pulled import UNFINISHED, is_hub_id

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

# The files of a checkpoint that djinnd reads, and those that the daemon itself fetches: no pickles, no code.
FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]
_INSTALL = "pull needs the library huggingface_hub: pip install 'djinn-client[hub]'"


def pull(hub_id: str, folder: Path, revision: str | None = None) -> Path:
    """Fetches what is missing of the checkpoint, with a progress bar on a terminal, and returns its folder, which is
    below `folder`.

    Raises click.UsageError for a name that is no hub id, and click.ClickException with the library's own account of
    what went wrong."""
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
        # Without this question the library takes a folder that is there for the whole, where the hub does not answer.
        wanted = huggingface_hub.HfApi().model_info(hub_id, revision=revision)
        target.mkdir(parents=True, exist_ok=True)
        (target / UNFINISHED).touch()
        huggingface_hub.snapshot_download(hub_id, revision=wanted.sha, local_dir=target, allow_patterns=FILES)
    except Exception as error:  # of the network, the licence, the disk or the name
        raise click.ClickException(f"{hub_id} could not be fetched: {error}") from error
    if missing := [name for name in _names(wanted) if not (target / name).is_file()]:
        raise click.ClickException(f"{hub_id} has not come whole, {missing[0]} is missing: the same command goes on")
    if not (target / "config.json").is_file():
        raise click.ClickException(f"{hub_id} is no checkpoint that djinnd can read: it has no config.json")
    (target / UNFINISHED).unlink()
    return target


def told(hub_id: str, target: Path, is_found: bool) -> str:
    """The lines that tell where the model is and how to talk to it. `is_found`: clients find it by its hub id."""
    return f"{hub_id} is in {target}\nTalk to it: djinnctl run {hub_id if is_found else target}"


def _names(of: ModelInfo) -> list[str]:
    """The names of the model's files that match FILES."""
    names = (file.rfilename for file in of.siblings or ())
    return [name for name in names if any(fnmatch(name, pattern) for pattern in FILES)]
