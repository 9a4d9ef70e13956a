"""Code for the few families that the generic adapter cannot serve alone. One file a family; most need none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from djinnd.model.families import altup, branch_factor, falcon, gptj, indexers, llama4, selective_scan

# Families with a class or function that is replaced in transformers' module. Called before the build.
PATCHED: dict[str, Callable[[], None]] = {"falcon": falcon.install, "gptj": gptj.install}
PATCHED |= {family: partial(selective_scan.install, family) for family in ("falcon_mamba", "jamba", "mamba")}

# Families that need a change of their modules: called with the blocks after the model has been built.
ADAPTED = dict.fromkeys(branch_factor.FAMILIES, branch_factor.move)
ADAPTED["llama4_text"] = llama4.adapt
ADAPTED["gemma3n_text"] = altup.adapt
ADAPTED |= dict.fromkeys(indexers.FAMILIES, indexers.remove)
