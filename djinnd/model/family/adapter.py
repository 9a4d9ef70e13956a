"""Adapter: runs any decoder-only family of transformers block by block, without code for the family.

The arguments of a family's layers are learnt. Stand-ins replace the layers in the model, the model's own forward runs
over them, and each stand-in records its arguments. The same forward serves as prologue (embedding, positions) and as
epilogue (final norm, head, and any scale or cap that the family applies there):

    prologue   forward(ids, positions) over stand-ins; the last one stops it       → hidden, arguments of every block
    blocks     block i (hidden, its arguments), with attention over pages          → hidden
    epilogue   forward over stand-ins; the last one returns the given hidden       → logits
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from djinn_client.errors import ModelRejected
from djinn_client.protocol.fields.kv_layout import BlockShape
from djinnd.model.families import altup


class PrologueDone(Exception):
    """Raised by the last stand-in when the arguments of all blocks have been recorded."""


MOST_VALUES = 3  # that a block returns, in a tuple
HANDED_ON = object()  # stands in for what a block returns beside the hidden states


class _StandIn(nn.Module):
    """Stands in for a block in the model's own list of layers. Records its arguments in the prologue; passes the final
    hidden states on in the epilogue."""

    def __init__(self, index: int, adapter: Adapter, block: nn.Module) -> None:
        super().__init__()
        self.index = index
        self.last = index == len(adapter.blocks) - 1
        self.adapter = weakref.proxy(adapter)  # the adapter owns this object: a cycle would keep unloaded weights alive
        self.states: int = getattr(block, "hidden_states", 0)  # of a token, if they are several
        object.__setattr__(self, "block", block)  # bypasses nn.Module, which would register the block as a child

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        adapter = self.adapter
        if adapter.final_hidden is None:
            adapter.record(self.index, altup.fold(hidden) if self.states else hidden, args, kwargs)
            if self.last:
                raise PrologueDone
            out = hidden
        else:
            out = altup.unfold(adapter.final_hidden, self.states) if self.states else adapter.final_hidden
        return (out, *[HANDED_ON] * (adapter.values - 1)) if adapter.values else out

    def __getattr__(self, name: str) -> Any:  # the model's forward reads attributes of its layers (`attention_type`)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "block"), name)


class _Places(nn.ModuleList):
    """The stand-ins, where the model's own forward finds its layers. Most families take a slice of all layers in each
    pass. It is this list itself, because torch would register each layer in a new one."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and range(len(self))[index] == range(len(self)):
            return self
        return super().__getitem__(index)


@dataclass(slots=True)
class Prologue:
    """The inputs of the blocks. Tensors in them keep their addresses, so a captured graph may hold them."""

    hidden: Tensor  # [1, tokens, width], in memory of its own: changing it changes only the input of block 0
    arguments: list[dict[str, Any]]  # keyword arguments of each block


def check_inputs(prologue: Prologue, blocks: Sequence[nn.Module], family: str) -> None:
    """prologue: of two tokens. Raises ModelRejected if `blocks` take anything but a hidden state for each token. The
    arguments in a block's `unread` do not count: a family's code (djinnd.model.families) has removed their readers."""
    hidden = prologue.hidden
    if hidden.dim() != 3 or hidden.shape[:2] != (1, 2):
        raise ModelRejected(
            f"the blocks of {family} take more than one hidden state a token: {list(hidden.shape)}", family=family
        )
    handed: set[str] = set()
    for block, given in zip(blocks, prologue.arguments, strict=True):
        handed |= {name for name, value in given.items() if value is HANDED_ON} - {*getattr(block, "unread", ())}
    if handed:
        raise ModelRejected(
            f"each block of {family} hands `{min(handed)}` on to the next one beside the hidden states; this is not "
            "supported, as sessions stop and are edited between two blocks: use a model of another type",
            family=family,
        )


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The model's list of decoder layers. Raises ModelRejected unless there is exactly one."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and type(m[0]).__name__ in names]
    if len(found) != 1:
        kinds = ", ".join(sorted(names)) or "unnamed"
        raise ModelRejected(
            f"{type(model).__name__} has {len(found)} lists of decoder layers ({kinds}); djinnd runs models with "
            "exactly one",
            family=type(model).__name__,
        )
    return found[0]


class Adapter:
    """Owns a model with a head. Takes its layers out (`blocks`) and puts stand-ins in their places.

    `language_model` is the module that runs: `model`, or a language model with a head of its own inside of a wrapper.
    """

    def __init__(self, model: nn.Module, language_model: nn.Module | None = None) -> None:
        self.model = model
        self.language_model = language_model or model
        places = find_blocks(model)
        self.blocks: list[nn.Module] = list(places)
        self.values = 0  # values that a block returns in a tuple; 0: it returns the hidden states alone
        self.final_hidden: Tensor | None = None
        # Names of the arguments of each block's forward, without the hidden states.
        self._names = [list(inspect.signature(block.forward).parameters)[1:] for block in self.blocks]
        self._recorded: list[dict[str, Any]] = [{} for _ in self.blocks]
        self._hidden: Tensor | None = None
        self.shared: dict[str, dict[Any, BlockShape]] = {}  # see kv_shapes.shared_arguments
        self._is_shared: bool | None = None  # see _is_shared; learnt in the first prologue, the same on every device
        for index, block in enumerate(self.blocks):
            places[index] = _StandIn(index, self, block)
        if type(places) is nn.ModuleList:
            places.__class__ = _Places

    def record(self, index: int, hidden: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._recorded[index] = {**dict(zip(self._names[index], args, strict=False)), **kwargs}
        if index == 0:
            self._hidden = hidden

    def prologue(self, ids: Tensor, positions: Tensor) -> Prologue:
        """ids, positions: int64 [1, tokens]."""
        with suppress(PrologueDone):
            self.language_model(input_ids=ids, position_ids=positions, use_cache=False)
        return self.recorded()

    def learn_prologue(self, ids: Tensor) -> Prologue:
        """The first prologue, on the meta device. Learns from the model's own forward how many values it expects of a
        block."""
        for values in range(MOST_VALUES):
            self.values = values
            with suppress(ValueError, IndexError, TypeError):  # of `hidden, weights = layer(…)` and `layer(…)[0]`
                return self.prologue(ids, ids)
        self.values = MOST_VALUES
        return self.prologue(ids, ids)

    def recorded(self) -> Prologue:
        """The prologue of the forward that has just run up to the blocks."""
        hidden = self._hidden
        assert hidden is not None
        if self._is_shared is None:
            others = [*self.model.parameters(), *self.model.buffers(), *self._recorded]
            self._is_shared = _is_shared(hidden, others)
        self._fill_shared(hidden)
        return Prologue(hidden.clone() if self._is_shared else hidden, list(self._recorded))

    def _fill_shared(self, hidden: Tensor) -> None:
        """Gives each mapping in which blocks share KV a placeholder for what no block has stored yet. Attention does
        not read it: the KV is in the pages."""
        for name, entries in self.shared.items():
            for stored, shape in entries.items():
                self._recorded[0][name].setdefault(
                    stored,
                    tuple(
                        hidden.new_zeros(1, shape.heads, 1, width).expand(-1, -1, hidden.shape[1], -1)
                        for width in (shape.key_width, shape.value_width)
                    ),
                )

    def run_block(self, index: int, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """hidden [1, tokens, width] → [1, tokens, width]."""
        out = self.blocks[index](hidden, **arguments)
        if isinstance(out, tuple):
            self.values = len(out)
            return out[0]
        return out

    def epilogue(self, hidden: Tensor) -> Tensor:
        """hidden [1, rows, width] → logits [rows, vocab] in the model's dtype."""
        rows = hidden.shape[1]
        # The embedding of these ids is not used. It costs little, and no code for each family's tail is needed.
        ids = torch.zeros(1, rows, dtype=torch.long, device=hidden.device)
        self.final_hidden = hidden
        try:
            logits = self.language_model(input_ids=ids, position_ids=ids, use_cache=False).logits
        finally:
            self.final_hidden = None
        return logits[0]


def _is_shared(tensor: Tensor, others: list[Any]) -> bool:
    """Returns True if a tensor anywhere in the nested structures of `others` shares the tensor's storage."""
    memory = tensor.untyped_storage()._cdata  # not data_ptr(): tensors on the meta device have no addresses
    return any(isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata == memory for leaf in tree_leaves(others))
