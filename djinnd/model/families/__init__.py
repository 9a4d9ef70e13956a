"""Code for the few families that the generic adapter cannot serve alone. One file a family; most need none."""

from __future__ import annotations

from functools import partial

from djinnd.model.families import branch_factor, falcon, gptj, llama4, own_weight

# Families that ignore transformers' attention interface. Called before the build; adds an attention class that uses it.
PATCHED = {"falcon": falcon.install, "gptj": gptj.install}

# Families that need a change of their modules: called with the blocks after the model has been built.
ADAPTED = dict.fromkeys(branch_factor.FAMILIES, branch_factor.move)
ADAPTED |= {family: partial(own_weight.keep, path=path) for family, path in own_weight.FAMILIES.items()}
ADAPTED["llama4_text"] = llama4.adapt
