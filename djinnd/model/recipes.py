"""Which checkpoint tensors make which parameter.

Transformers renames and merges the tensors of older checkpoints (`block_sparse_moe.experts.*.w1` of Mixtral become one
stacked `mlp.experts.gate_up_proj`). Its own table of these conversions is used here, one parameter at a time, so that
a block can be read without the rest of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from djinn_client.errors import ModelRejected
from djinnd.weights.checkpoint import Checkpoint
from djinnd.weights.store import Recipe


@dataclass(slots=True)
class _Sources:
    """The tensors of one parameter, in the order in which experts are stacked."""

    converter: WeightConverter | None
    first: str  # what the converter makes comes under names that it derives from this one
    tensors: list[tuple[str, str]] = field(default_factory=list)  # (name in the checkpoint, pattern of the converter)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """What converters ask of a model, which has other modules in the places of its blocks when they are run."""

    by_name: dict[str, Tensor]  # on the meta device

    def get_parameter(self, name: str) -> Tensor:
        return self.by_name[name]


class RecipeBook:
    """Made from the whole model while its layers are in place; asked for one parameter at a time."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._config = model.config
        self._parameters = _Parameters(model.state_dict())
        self._sources = _match(model, checkpoint)

    def require(self, names: Iterable[str], tied: dict[str, list[str]]) -> None:
        """Raises ModelRejected when a parameter has no source, or one that cannot be read.

        A tied parameter may have been saved under any of its names; under several, with the same values.
        """
        for first, others in tied.items():
            for other in others:
                if other in self._sources:
                    self._adopt(first, other)
        names = list(names)
        missing = [name for name in names if name not in self._sources]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelRejected(
                f"{self._checkpoint.folder} lacks tensor {missing[0]}{more}", tensor=missing[0], missing=len(missing)
            )

        for name in names:
            for source, _ in self._sources[name].tensors:
                self._checkpoint.check_readable(source)

    def _adopt(self, first: str, other: str) -> None:
        """What was saved as `other` is `first`, too."""
        if first not in self._sources:
            self._sources[first] = self._sources[other]
        elif not torch.equal(self.recipe(first)(), self.recipe(other)()):
            raise ModelRejected(
                f"{self._checkpoint.folder / 'config.json'} says that {first} and {other} are one tensor, but the "
                "checkpoint has two different ones: set tie_word_embeddings to false",
                tensor=other,
            )

    def recipe(self, name: str) -> Recipe:
        sources = self._sources[name]
        if sources.converter is None:
            source = sources.tensors[0][0]
            return partial(self._checkpoint.read, source)
        return partial(self._convert, name, sources)

    def _convert(self, name: str, sources: _Sources) -> Tensor:
        converter = deepcopy(sources.converter)
        assert converter is not None
        for source, pattern in sources.tensors:
            read: Any = partial(self._checkpoint.read, source)
            converter.add_tensor(sources.first, source, pattern, read)
        try:
            made = converter.convert(sources.first, model=self._parameters, config=self._config)[name]
        except Exception as error:  # transformers' own converters, on the checkpoint's tensors
            raise ModelRejected(f"tensors of {name} cannot be merged: {error}", tensor=name) from error
        return made[0] if isinstance(made, list) else made


def _match(model: Any, checkpoint: Checkpoint) -> dict[str, _Sources]:
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    prefix = model.base_model_prefix
    sources: dict[str, _Sources] = {}
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            continue  # masks and frequencies that old checkpoints carry along
        converter = by_pattern[pattern] if pattern is not None else None
        for made in _made_by(converter, target):
            sources.setdefault(made, _Sources(converter, target)).tensors.append((name, pattern or name))
    return sources


def _made_by(converter: WeightConverter | None, target: str) -> list[str]:
    """The parameters that come of a tensor: transformers names the first of them, `target`, and a converter may split
    the tensor into several."""
    if converter is None or len(converter.target_patterns) == 1:
        return [target]
    first, *others = converter.target_patterns
    return [target, *(target.replace(first, other) for other in others)]
