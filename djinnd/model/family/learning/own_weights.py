"""Own weights: linear modules with parameters that the family's forward reads itself, beside or instead of a call.

Such a module keeps its parameters, where other linear modules become products (placing/projections.py). Jamba
multiplies with the weight of `dt_proj`, and LongCat Flash with that of its router. They are found by a run on the meta
device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from djinnd.model.family.adapter import Adapter, Prologue
from djinnd.model.family.learning.dry_run import dry
from djinnd.model.family.learning.kinds import kind_of

log = logging.getLogger("djinnd.engine")


class OwnWeight(nn.Linear):
    """Not `nn.Linear` itself, so it is not replaced."""


def keep_own_weights(adapter: Adapter, prologue: Prologue) -> None:
    """Makes an OwnWeight of each linear module if the block reads its parameters outside of the module's forward.

    prologue: of a run on the meta device. Blocks of one kind are run once.
    """
    by_kind: dict[object, list[str]] = {}
    for index, block in enumerate(adapter.blocks):
        kind = kind_of(block)
        if kind not in by_kind:
            run = partial(adapter.run_block, index, prologue.hidden, prologue.arguments[index])
            by_kind[kind] = _read_outside(block, run)
        for path in by_kind[kind]:
            block.get_submodule(path).__class__ = OwnWeight


def _read_outside(block: nn.Module, run: Callable[[], object]) -> list[str]:
    linears = {path: module for path, module in block.named_modules() if type(module) is nn.Linear}
    reads = _Reads({id(p): path for path, module in linears.items() for p in module.parameters()})
    with ExitStack() as undo:
        undo.enter_context(dry(block))
        for module in linears.values():
            undo.enter_context(module.register_forward_pre_hook(lambda *_: reads.inside(True)))
            undo.enter_context(module.register_forward_hook(lambda *_: reads.inside(False)))
        try:
            with reads:
                run()
        except Exception as missing:  # not all of a family's forward runs on the meta device; the check at load does
            log.info("block_not_run kind=%s error=%r", type(block).__name__, missing)
    return sorted(reads.found)


class _Reads(TorchFunctionMode):
    """Notes the parameters that functions of torch get while no linear module runs."""

    def __init__(self, paths: dict[int, str]) -> None:
        """paths: for the id of a parameter the path of its module."""
        super().__init__()
        self.found: set[str] = set()
        self._paths = paths
        self._is_inside = False

    def inside(self, is_inside: bool) -> None:
        self._is_inside = is_inside

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_inside and getattr(function, "__name__", "") != "__get__":  # `weight.dtype`, `weight.shape`
            given = tree_leaves([args, kwargs])
            self.found |= {self._paths[id(value)] for value in given if id(value) in self._paths}
        return function(*args, **(kwargs or {}))
