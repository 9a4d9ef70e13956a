"""Models that `djinnctl pull` has fetched: folders below one folder of the caller's, each called by its hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path

from djinn_client.errors import ModelNotFound

UNFINISHED = ".djinnctl-pull"  # this file is in a model's folder until all of the model is there
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def models_folder() -> Path:
    """$DJINN_MODELS, or a folder in the caller's home directory."""
    if named := os.environ.get("DJINN_MODELS"):
        return Path(named).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(data) / "djinnd" / "models"


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None


def pulled_folder(name: str) -> str | None:
    """The folder of a hub id that was pulled; None for every other name. Raises ModelNotFound for one whose download
    broke off."""
    if not is_hub_id(name):
        return None
    folder = models_folder() / name
    if (folder / UNFINISHED).is_file():
        raise ModelNotFound(f"only a part of {name} is here: `djinnctl pull {name}` fetches the rest", model=name)
    return str(folder.absolute()) if (folder / "config.json").is_file() else None
