"""Learns the paths of the modules at which sessions may read and edit activations, by a run on the meta device.

    layers      the list of blocks;
    attention   within a block, the module that calls attention (its output is the output of o_proj);
    mlp         within a block, the only child beside attention that has matrices and returns hidden states;
    norm        the last module between the last block and the head that has no matrices;
    head        the output embedding, if its output is sampled from directly, without a cap or scale.

These are the modules on which users of Hugging Face put hooks, with the same outputs. If a family has a norm after
attention or MLP, the output is the one before that norm. A factor in that place is moved into the modules
(families/branch_factor.py). If the MLP is two products without a module of their own (OPT), the point is the second,
fc2, because the first does not return hidden states.

A point has no path if several children qualify, or if its name differs between blocks: a name must mean the same in
every block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from djinn_client.protocol.fields.points import PointMap
from djinnd.model.family.adapter import Adapter
from djinnd.model.family.learning.dry_run import dry
from djinnd.model.family.learning.kinds import kind_of

_TOKENS = 2


@torch.inference_mode()
def learn_points(adapter: Adapter, layers: str, vocab: int) -> PointMap:
    """Learns the points of a model on the meta device. `layers`: the path of its list of blocks. A part of the model
    that cannot run on the meta device has no points."""
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    prologue = adapter.prologue(ids, ids)
    first_of_kind = {kind_of(block): index for index, block in reversed(list(enumerate(adapter.blocks)))}
    attention, mlp = set(), set()
    for index in first_of_kind.values():
        run = partial(adapter.run_block, index, prologue.hidden, prologue.arguments[index])
        own_attention, own_mlp = _names_within(adapter.blocks[index], run, prologue.hidden)
        attention.add(own_attention)
        mlp.add(own_mlp)
    norm, head = _names_behind(adapter, f"{layers}.{len(adapter.blocks) - 1}", prologue.hidden)
    return PointMap(
        blocks=len(adapter.blocks),
        width=prologue.hidden.shape[-1],
        vocab=vocab,
        layers=layers,
        attention=attention.pop() if len(attention) == 1 else "",
        mlp=mlp.pop() if len(mlp) == 1 else "",
        norm=norm,
        head=head,
    )


def _names_within(block: nn.Module, run: Callable[[], object], hidden: Tensor) -> tuple[str, str]:
    """Paths of attention and of the MLP within the block; "" if there is none."""
    gave = _Outputs()
    with ExitStack() as undo:
        paged = undo.enter_context(dry(block))
        for path, module in block.named_modules():
            undo.enter_context(module.register_forward_hook(partial(gave.note, path)))
        _try(run)
    callers = [path for path, own in paged.items() if own.calls == 1 and gave.once_like(path, hidden)]
    if len(callers) != 1:
        return "", ""
    caller = callers[0]
    beside = [(path, child) for path, child in block.named_children() if path != caller.partition(".")[0]]
    candidates = [path for path, child in beside if _has_matrices(child) and gave.once_like(path, hidden)]
    return caller, candidates[0] if len(candidates) == 1 else ""


def _names_behind(adapter: Adapter, last_block: str, hidden: Tensor) -> tuple[str, str]:
    """Paths of the final norm and of the head; "" if there is none."""
    model, gave = adapter.model, _Outputs()
    head = model.get_output_embeddings()  # type: ignore[operator]
    with ExitStack() as undo:
        for path, module in model.named_modules():
            if not module._modules:
                undo.enter_context(module.register_forward_hook(partial(gave.note, path)))
        logits = _try(lambda: adapter.epilogue(hidden))
    if not isinstance(logits, Tensor) or last_block not in gave.order:
        return "", ""
    behind = gave.order[gave.order.index(last_block) + 1 :]
    norms = [path for path in behind if not _has_matrices(model.get_submodule(path)) and gave.once_like(path, hidden)]
    heads = [path for path in behind if model.get_submodule(path) is head and gave.is_memory_of(path, logits)]
    return norms[-1] if norms else "", heads[-1] if heads else ""


class _Outputs:
    """Records the outputs of modules by their paths, and the order in which the modules ran."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._values: dict[str, list[object]] = {}

    def note(self, path: str, module: nn.Module, arguments: Any, output: Any) -> None:
        self.order.append(path)
        self._values.setdefault(path, []).append(output[0] if isinstance(output, tuple) else output)

    def once_like(self, path: str, hidden: Tensor) -> bool:
        """Returns True if the module ran once and returned a tensor shaped like the hidden states."""
        values = self._values.get(path, [])
        rows = hidden.shape[1:]
        return len(values) == 1 and isinstance(values[0], Tensor) and values[0].shape in (rows, (1, *rows))

    def is_memory_of(self, path: str, tensor: Tensor) -> bool:
        """Returns True if the tensor is the module's output or a view of it."""
        (*_, value) = self._values[path]
        return isinstance(value, Tensor) and value.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def _has_matrices(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _try(run: Callable[[], object]) -> object:
    try:
        return run()
    except Exception:  # a family's forward may raise exceptions of any type on the meta device
        return None
