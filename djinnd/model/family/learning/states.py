"""Finds the modules of a model that keep a state, by a run of each block on the meta device.

Such a module asks the cache that it is given for a convolution or a recurrent state. Attention asks its cache to
`update` keys and values, which are not kept here.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from djinnd.model.family.adapter import Adapter, Prologue
from djinnd.model.family.learning.dry_run import dry
from djinnd.model.family.learning.kinds import kind_of
from djinnd.model.states.carrier import MOST_STATES, Carrier
from djinnd.model.states.layout import Stateful
from djinnd.model.states.step_calls import learn_calls
from djinnd.model.states.workspace import measure

log = logging.getLogger("djinnd.engine")

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # of 5.24, and of older versions


class _Learning(Carrier):
    """A cache without states, for one module. Attention in the same block may use it, too."""

    def __init__(self) -> None:
        super().__init__(MOST_STATES)
        self.hidden: Tensor  # the module's arguments, without the cache and a mask of padding
        self.given: dict[str, Any]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def learn_states(adapter: Adapter, prologue: Prologue) -> list[Stateful]:
    """The modules of all blocks that keep a state. prologue: of a run on the meta device. Blocks of one kind are run
    once."""
    found: list[Stateful] = []
    by_kind: dict[object, list[Stateful]] = {}
    for index, block in enumerate(adapter.blocks):
        kind = kind_of(block)
        if kind not in by_kind:
            by_kind[kind] = _of_block(
                block, partial(adapter.run_block, index, prologue.hidden, prologue.arguments[index])
            )
        found += (replace(one, block=index) for one in by_kind[kind])
    return found


def _of_block(block: nn.Module, run: Callable[[], object]) -> list[Stateful]:
    given: dict[str, tuple[str, _Learning]] = {}
    with ExitStack() as undo:
        undo.enter_context(dry(block))
        for path, module in block.named_modules():
            name = cache_name(module)
            if name is not None and path:
                cache = _Learning()
                given[path] = (name, cache)
                undo.enter_context(module.register_forward_pre_hook(_giving(name, cache), with_kwargs=True))
        try:
            run()
        except Exception as missing:  # a family's forward may raise exceptions of any type
            if _is_own(missing):
                raise
            log.info("block_not_run kind=%s error=%r", type(block).__name__, missing)
    found = []
    for path, (name, cache) in given.items():
        if specs := cache.specs():
            workspace = measure(block.get_submodule(path), name, specs, cache.hidden, cache.given)
            calls = learn_calls(block.get_submodule(path), name, specs, cache.hidden, cache.given)
            found.append(Stateful(0, path, name, tuple(specs), workspace, calls))
    return found


def _is_own(error: Exception) -> bool:
    """Returns True if the error was raised in this package, and not by the family's forward or by torch."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).startswith(f"{__package__}.")


def cache_name(module: nn.Module) -> str | None:
    """The name of the argument by which the module's forward takes a cache."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), None)


def _giving(name: str, cache: _Learning) -> Callable[[nn.Module, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cache.given = {key: value for key, value in kwargs.items() if key not in (name, "attention_mask")}
        cache.hidden = args[0] if args else cache.given.pop("hidden_states")
        return args, {**kwargs, name: cache}

    return hook
