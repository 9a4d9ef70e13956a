"""Resolves the name of a model: a configured model, the model that ships with djinnd, a folder, or a hub id."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from importlib.resources import files

from djinn_client.errors import ModelNotFound
from djinnd import config

SHIPPED = "djinn-tiny"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def known_models(configured: Mapping[str, config.Model]) -> dict[str, config.Model]:
    """The configured models and the shipped one."""
    shipped = config.Model(path=str(files("djinnd") / "models" / SHIPPED))
    return {SHIPPED: shipped, **configured}


def hub_model(name: str, known: Collection[str], hub: bool) -> config.Model:
    """The model of the hub that a name stands for, if clients may name hub ids (`hub`). Raises ModelNotFound with the
    names of the `known` models."""
    if hub and is_hub_id(name):
        return config.Model(path=name)
    near = difflib.get_close_matches(name, known, n=1)
    suggestion = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
    others = "or org/name" if hub else "hub ids are switched off here"
    raise ModelNotFound(f"no model is called {name[:200]!r}: {suggestion} (or a checkpoint's folder; {others})")


def is_hub_id(path: str) -> bool:
    return _HUB_ID.fullmatch(path) is not None
