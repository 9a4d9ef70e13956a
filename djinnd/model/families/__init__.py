"""What the generic adapter cannot learn of a family. One file a family; most need none."""

from __future__ import annotations

from djinnd.model.families import branch_factor, falcon, gptj

# Families whose attention ignores transformers' attention interface, but for which we brought a subclass.
PATCHED = {"falcon": falcon.install, "gptj": gptj.install}

# Families whose modules are changed after they have been built.
ADAPTED = dict.fromkeys(branch_factor.FAMILIES, branch_factor.move)
