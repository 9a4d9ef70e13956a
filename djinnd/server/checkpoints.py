"""Where a model's checkpoint is: what is configured, the model that ships with djinnd, a folder, or a hub id."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from djinn_client.errors import ModelNotFound
from djinnd import config

SHIPPED = "djinn-tiny"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model"]  # and no pickles, no code


def known_models(configured: Mapping[str, config.Model]) -> dict[str, config.Model]:
    """The configured models and the shipped one."""
    shipped = config.Model(path=str(files("djinnd") / "models" / SHIPPED))
    return {SHIPPED: shipped, **configured}


def model_named(name: str, known: Mapping[str, config.Model]) -> config.Model:
    """What a caller means by `name`. Raises ModelNotFound with what there is."""
    if name in known:
        return known[name]
    if name.startswith("/") or _HUB_ID.fullmatch(name):
        return config.Model(path=name)
    near = difflib.get_close_matches(name, known, n=1)
    suggestion = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
    raise ModelNotFound(f"no model is called {name[:200]!r}: {suggestion} (or a checkpoint's folder, or org/name)")


def find_checkpoint(name: str, path: str) -> Path:
    """The checkpoint's folder, downloaded where `path` is a hub id: for a thread. Raises ModelNotFound."""
    if _HUB_ID.fullmatch(path):
        return _from_hub(path)
    folder = Path(path)
    if not folder.is_dir():
        raise ModelNotFound(f"{name}: there is no folder {path}")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{name}: {path} is not a checkpoint: it has no config.json")
    return folder


def _from_hub(hub_id: str) -> Path:
    import huggingface_hub  # only who asks for such a model needs it

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_FILES))
    except Exception as error:  # network, licence, disk, name: the library has its own account of each
        offline = os.environ.get("HF_HUB_OFFLINE")
        remedy = "HF_HUB_OFFLINE is set." if offline else "is the name right, and the hub within reach?"
        raise ModelNotFound(
            f"{hub_id} could not be fetched from the hub ({remedy} Or give the folder of a copy): {error}"
        ) from error
