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
    tensors: list[tuple[str, str]] = field(default_factory=list)  # (name in the checkpoint, pattern of the converter)


class RecipeBook:
    """Made from the whole model while its layers are in place; asked for one parameter at a time."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._model = model
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
            converter.add_tensor(name, source, pattern, partial(self._checkpoint.read, source))  # type: ignore[arg-type]
        try:
            made = converter.convert(name, model=self._model, config=self._model.config)[name]
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
        sources.setdefault(target, _Sources(converter)).tensors.append((name, pattern or name))
    return sources
