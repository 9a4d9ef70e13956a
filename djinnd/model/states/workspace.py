"""Workspace: the memory that a module with a state needs while it computes.

transformers' functions of torch hold several tensors of a chunk at a time, and the states of all rows of one token.
Their sum depends on the family's code, so it is measured: the module runs on the meta device, and the bytes of all
tensors that exist at a time are counted. With rows they grow linearly. With the tokens of a part of a row they may grow
faster, as some code has a tensor with an element for each pair of chunks, or needs most memory at another operation. So
parts are measured up to the longest one: between two measured sizes, a line is never below what is needed.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from djinnd.kvcache.tuning import MOST_STATE_TOKENS
from djinnd.model.families.selective_scan import starting_from
from djinnd.model.states.carrier import Carrier, StateSpec

log = logging.getLogger("djinnd.engine")

PARTS = (256, 1024, MOST_STATE_TOKENS)  # tokens of the measured parts; families compute in chunks of up to 256
ROWS = 8  # measured for these and for twice as many


@dataclass(frozen=True, slots=True)
class StateWorkspace:
    """Bytes of all tensors that exist at a time in a call of a module with a state, as it has been measured."""

    part_bytes: tuple[int, ...] = (0,) * len(PARTS)  # of parts of a row with as many tokens as PARTS has
    row_bytes: int = 0  # of each row of one token
    fixed_bytes: int = 0

    def of(self, tokens: int, rows: int) -> int:
        """Bytes for a step with up to `rows` rows of one token, and with longer parts of rows. These run after each
        other, and have up to `tokens` tokens each. An eighth is for memory that stays free between tensors."""
        assert tokens <= PARTS[-1], tokens
        part = int(np.interp(tokens, PARTS, self.part_bytes))
        return max(part, self.fixed_bytes + rows * self.row_bytes) * 9 // 8


NOTHING = StateWorkspace()


def largest(each: Iterable[StateWorkspace]) -> StateWorkspace:
    """Enough for modules that run after each other."""
    parts = [(*one.part_bytes, one.row_bytes, one.fixed_bytes) for one in each]
    if not parts:
        return NOTHING
    *part_bytes, row_bytes, fixed_bytes = map(max, zip(*parts, strict=True))
    return StateWorkspace(tuple(part_bytes), row_bytes, fixed_bytes)


def measure(module: nn.Module, cache: str, specs: Sequence[StateSpec], hidden: Tensor, given: Any) -> StateWorkspace:
    """hidden: [1, tokens, width] on the meta device; given: other named arguments of the module's forward."""

    def run(rows: int, tokens: int) -> int:
        states = [torch.empty(rows, *spec.shape, dtype=spec.dtype, device="meta") for spec in specs]
        x = hidden.new_empty(rows, tokens, hidden.shape[-1])
        with starting_from(next((s for s, spec in zip(states, specs, strict=True) if spec.kind == "recurrent"), None)):
            peak = peak_bytes(lambda: module(x, **{**given, cache: Carrier.with_states(specs, states)}))
        return peak + 2 * sum(state.nbytes for state in states)  # gathered, and being written

    try:
        parts = tuple(run(1, tokens) for tokens in PARTS)
        one, several = run(ROWS, 1), run(2 * ROWS, 1)
    except Exception as error:  # a family's forward may raise exceptions of any type on the meta device
        log.warning("workspace_not_measured kind=%s error=%r", type(module).__name__, error)
        return NOTHING
    a_row = (several - one) // ROWS
    return StateWorkspace(parts, a_row, max(one - a_row * ROWS, 0))


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes of tensors made by `run` that exist at a time."""
    with _Living() as living:
        run()
    return living.peak


class _Living(TorchDispatchMode):
    """Counts the bytes of the storages of all tensors that functions return, until the last view of them is gone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._bytes = 0
        self._views: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in tree_leaves([args, kwargs]) if isinstance(value, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor, given)
        self.peak = max(self.peak, self._bytes)
        return out

    def _add(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        memory, nbytes = storage._cdata, storage.nbytes()
        if not self._views[memory]:
            if memory in given:
                return  # a view of what was there before
            self._bytes += nbytes
        self._views[memory] += 1
        weakref.finalize(tensor, self._remove, memory, nbytes)

    def _remove(self, memory: int, nbytes: int) -> None:
        self._views[memory] -= 1
        if not self._views[memory]:
            del self._views[memory]
            self._bytes -= nbytes
