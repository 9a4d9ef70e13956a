"""Learns where a model's attentions keep their KV, by a run on the meta device.

Each block runs up to its call of attention, which carries the shapes of K and V. As a rule a block has one attention. A
block with several modules of that kind has several, with an entry each (LongCat Flash).

Blocks that share KV (Gemma 3n, Gemma 4) pass it on in a mapping, which is an argument of every block: some blocks
store their keys and values there, and later blocks attend to them. djinnd's later blocks read the pages instead. They
get placeholders in the mapping, because a step may begin behind the block that stores.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from djinn_client.protocol.fields.kv_layout import BlockKv, BlockShape
from djinnd.model.attention.absorption import learn_absorption
from djinnd.model.attention.hf_attention import Wanted
from djinnd.model.attention.latents import Latents, keep_latents


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention of a model: where its module is."""

    block: int
    path: str  # of the module within the block
    latents: Latents | None = None
    expanding: tuple[str, ...] = ()  # paths within the block of the linear modules that expand latents
    expanded_width: int = 0  # of the key and value of a head that are made of a latent


@dataclass(slots=True)
class KvMap:
    """The attentions of a model in the order of its blocks, and the KV of each."""

    attentions: list[Attention] = field(default_factory=list)
    shapes: list[BlockKv] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)  # of the first attention in each block, on the meta device


def learn_kv(blocks: list[nn.Module], wanted_of: Callable[[int], Wanted | None]) -> KvMap:
    """`wanted_of`: runs a block up to its first call of attention; None: the block has no attention. Raises
    ModelRejected."""
    found = KvMap()
    first: list[int] = []  # entry of the first attention in each block
    for index, block in enumerate(blocks):
        latents = {path: made for path, module in block.named_modules() if (made := keep_latents(module)) is not None}
        wanted = wanted_of(index)
        if wanted is None:
            continue
        source = next((entry for entry, key in zip(first, found.keys, strict=True) if key is wanted.key), None)
        found.keys.append(wanted.key)
        first.append(len(found.shapes))
        paths = _attentions(block, wanted.module)
        key, value = latents[paths[0]].take() if latents else (wanted.key, wanted.value)
        shape: BlockKv = BlockShape(key.shape[1], key.shape[3], value.shape[3]) if source is None else source
        for path in paths:
            own, expanding = latents.get(path), tuple[str, ...]()
            if own is not None:
                expanding = _called(block, partial(own.expand, key, value))
                own.absorption = learn_absorption(block, expanding, own.expand, key.shape[3], value.shape[3])
            width = 0 if own is None else wanted.key.shape[3] + wanted.value.shape[3]
            found.attentions.append(Attention(index, path, own, expanding, width))
            found.shapes.append(shape)
    return found


def _called(block: nn.Module, run: Callable[[], object]) -> tuple[str, ...]:
    """Paths of the linear modules that are called while `run` runs."""
    called = list[str]()
    with ExitStack() as undo:
        for path, module in block.named_modules():
            if isinstance(module, nn.Linear):
                note = module.register_forward_pre_hook(lambda *_, path=path: called.append(path))
                undo.callback(note.remove)
        run()
    return tuple(called)


def _attentions(block: nn.Module, first: nn.Module) -> list[str]:
    """Paths of the block's modules that are like `first`, which is the one that runs first."""
    alike = [
        (path, module)
        for path, module in block.named_modules()
        if type(module) is type(first) and _sizes(module) == _sizes(first)
    ]
    assert alike and alike[0][1] is first, "the attention that runs first is not the block's first module of its kind"
    return [path for path, _ in alike]


def _sizes(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


def shared_arguments(arguments: dict[str, Any], keys: list[Tensor]) -> dict[str, dict[Any, BlockShape]]:
    """The mappings among a block's arguments in which blocks have stored one of `keys`: argument → name in the mapping
    → shape of what is stored there."""
    return {
        name: {
            stored: BlockShape(pair[0].shape[1], pair[0].shape[3], pair[1].shape[3])
            for stored, pair in given.items()
            if isinstance(pair, tuple) and any(pair[0] is key for key in keys)
        }
        for name, given in arguments.items()
        if isinstance(given, MutableMapping)
    }
