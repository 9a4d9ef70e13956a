"""Learns what each block of a model keeps between tokens, KV or a state, by runs on the meta device."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from djinn_client.errors import ModelRejected
from djinnd.model.attention.hf_attention import NoPages, Wanted
from djinnd.model.families import indexers
from djinnd.model.family.adapter import Adapter, Prologue, check_inputs
from djinnd.model.family.learning.kinds import kind_of
from djinnd.model.family.learning.kv_shapes import KvMap, learn_kv, shared_arguments
from djinnd.model.family.learning.own_weights import keep_own_weights
from djinnd.model.family.learning.states import learn_states
from djinnd.model.states.layout import Stateful

# Names of block kinds in configurations (`layer_types`). None: the configuration has no `layer_types`. A hybrid block
# has attention and a state beside each other. Indexers are removed.
_FULL = ("full_attention", "attention", "hybrid", None, *indexers.KINDS)
_SLIDING = ("sliding_attention", None)
_CHUNKED = ("chunked_attention",)

log = logging.getLogger("djinnd.engine")


@torch.inference_mode()
def learn_blocks(adapter: Adapter, config: Any) -> tuple[KvMap, list[Stateful]]:
    """→ the attentions with their KV, and the modules that keep a state. config: of the language model. Raises
    ModelRejected."""
    runs = _Runs(adapter, config)
    ids: Tensor = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        prologue = adapter.learn_prologue(ids)
        check_inputs(prologue, adapter.blocks, runs.family)
        keep_own_weights(adapter, prologue)
        runs.stateful = learn_states(adapter, prologue)
        found = learn_kv(adapter.blocks, lambda index: runs.attention_of(index, prologue))
    except ModelRejected:
        raise
    except Exception as error:  # a family's forward may raise exceptions of any type
        raise ModelRejected(f"{runs.family} cannot be run block by block: {error!r}", family=runs.family) from error
    adapter.shared = shared_arguments(prologue.arguments[0], found.keys)
    return found, runs.stateful


class _Runs:
    """Runs of a block up to its first call of attention, which carries the shapes of K and V.

    Blocks of one kind are run once, unless their runs leave something behind: KV that later blocks share, or latents.
    """

    def __init__(self, adapter: Adapter, config: Any) -> None:
        self.family: str = config.model_type
        self.stateful: list[Stateful] = []
        self._adapter = adapter
        self._kinds = getattr(config, "layer_types", None)
        self._by_kind: dict[object, tuple[str, Wanted] | None] = {}  # a path within the block, and the call there

    def attention_of(self, index: int, prologue: Prologue) -> Wanted | None:
        """None: the block has no attention, and belongs to a model with states."""
        block = self._adapter.blocks[index]
        is_shared = any(isinstance(value, MutableMapping) for value in prologue.arguments[index].values())
        if is_shared or any(hasattr(module, "expand_kv") for module in block.modules()):
            return self._run(index, prologue)
        kind = (kind_of(block), self._kinds and self._kinds[index])
        if kind not in self._by_kind:
            wanted = self._run(index, prologue)
            self._by_kind[kind] = None if wanted is None else (_path(block, wanted.module), wanted)
        if (known := self._by_kind[kind]) is None:
            return None
        path, wanted = known
        return replace(wanted, module=block.get_submodule(path), key=torch.empty_like(wanted.key))

    def _run(self, index: int, prologue: Prologue) -> Wanted | None:
        kind = str(self._kinds[index]) if self._kinds else None  # None: the configuration names no kinds
        if not self.stateful and kind not in (*_FULL, *_SLIDING, *_CHUNKED):
            self._refuse(f"block {index} of {self.family} is of a kind that djinnd does not serve: {kind}")
        try:
            self._adapter.run_block(index, prologue.hidden, prologue.arguments[index])
        except NoPages as call:
            self._check(call.wanted, kind)
            return call.wanted
        except Exception as error:  # a family's forward may raise exceptions of any type
            if self.stateful:  # experts behind the states cannot run without values
                log.info("block_not_run kind=%s error=%r", type(self._adapter.blocks[index]).__name__, error)
                return None
            if isinstance(error, NotImplementedError):  # torch says so of values on the meta device
                self._refuse(
                    f"block {index} of {self.family} needs the values of tokens before its attention, perhaps to "
                    "choose experts; KV is learnt without values, so this is not supported: use a model of another type"
                )
            raise
        if self.stateful:
            return None  # if the block remembers anything else, the check at load finds it
        self._refuse(
            f"block {index} of {self.family} never called transformers' attention interface, so djinnd cannot page its "
            "KV"
        )

    def _check(self, wanted: Wanted, kind: str | None) -> None:
        unserved = wanted.unserved
        served = _SLIDING if wanted.window else _CHUNKED if wanted.chunk else _FULL
        if not unserved and kind is not None and kind not in served:
            unserved = f"{kind} by a mask"  # djinnd makes no masks
        if unserved:
            self._refuse(f"the attention of {self.family} needs a feature that djinnd does not support: {unserved}")

    def _refuse(self, reason: str) -> NoReturn:
        raise ModelRejected(reason, family=self.family)


def _path(block: nn.Module, module: nn.Module) -> str:
    return next(path for path, own in block.named_modules() if own is module)
