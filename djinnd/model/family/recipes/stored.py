"""RecipeBook: how each parameter is made from the checkpoint's tensors.

Transformers renames and merges the tensors of older checkpoints: `block_sparse_moe.experts.*.w1` of Mixtral become one
stacked `mlp.experts.gate_up_proj`. Its table of conversions is applied here to one parameter at a time, so that a
block can be read without the rest of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from djinn_client.errors import ModelRejected
from djinnd.model.family.recipes.codes import stack_of_codes
from djinnd.weights.checkpoint import CheckpointFiles, wrong_shape
from djinnd.weights.forms.coded_form import Code, Coded
from djinnd.weights.store import Recipe


@dataclass(slots=True)
class _Sources:
    """The checkpoint tensors of one parameter, in the order in which experts are stacked."""

    converter: WeightConverter | None
    first: str  # the converter derives the names of its results from this name
    tensors: list[tuple[str, str]] = field(default_factory=list)  # (name in the checkpoint, pattern of the converter)


class RecipeBook:
    """The recipes of all parameters. Made while the model still has its own layers; see Adapter.

    name_of: the name of a tensor in a checkpoint of this model alone; None: this model does not have the tensor.
    """

    def __init__(
        self, model: Any, checkpoint: CheckpointFiles, name_of: Callable[[str], str | None] = lambda name: name
    ) -> None:
        self._checkpoint = checkpoint
        self._config = model.config
        # The part of the model's interface that converters use. Stand-ins have replaced its blocks when converters run.
        self._parameters = SimpleNamespace(get_parameter=model.state_dict().__getitem__)
        self._sources = _match(model, checkpoint, name_of)
        self._twins: dict[str, list[str]] = {}  # tied parameter → its other names that the checkpoint has, too

    def require(self, shapes: Mapping[str, tuple[int, ...]], tied: dict[str, list[str]]) -> None:
        """Raises ModelRejected if a parameter has no source, or one that cannot be read or has another shape.

        Memory is reserved for the shapes that config.json implies, so they are compared with the files before that.

        A tied parameter may be saved under any of its names. Under several names, its values must be equal.
        """
        for first, others in tied.items():
            for other in others:
                if other not in self._sources:
                    continue
                if first in self._sources:
                    self._twins.setdefault(first, []).append(other)
                else:
                    self._sources[first] = self._sources[other]
        missing = [name for name in shapes if name not in self._sources]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelRejected(
                f"the checkpoint lacks tensor {missing[0]}{more}", tensor=missing[0], missing=len(missing)
            )

        for name, shape in shapes.items():
            for source, _ in self._sources[name].tensors:
                self._checkpoint.check_readable(source)
            self._check_size(name, shape)

    def _check_size(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ModelRejected if the sources hold fewer numbers than the parameter. Converters rearrange numbers or
        drop some; none makes more numbers than it gets."""
        sources = self._sources[name]
        stored = [self._checkpoint.tensors[source].shape for source, _ in sources.tensors]
        if sources.converter is None and stored[0] != shape:
            raise wrong_shape(name, stored[0], shape)
        numbers = sum(map(math.prod, stored))
        if numbers < math.prod(shape):
            raise ModelRejected(
                f"tensors of {name} cannot be merged: {len(stored)} of them, of shapes such as {list(stored[0])}, have "
                f"{numbers:,} numbers in all, but the model needs {list(shape)}",
                tensor=name,
            )

    def recipe(self, name: str) -> Recipe:
        """A function that fills a view with the parameter's numbers."""
        fill = self._recipe_of(name, self._sources[name])
        twins = self._twins.get(name)
        return fill if twins is None else partial(self._fill_and_compare, name, fill, twins)

    def coded(self, name: str, shape: tuple[int, ...]) -> Coded | None:
        """The parameter of this shape in the code of its tensors. None if it is plain, or if its tensors cannot be
        joined in their codes: `recipe` then decodes them."""
        sources = self._sources[name]
        of = [source for source, _ in sources.tensors]
        if sources.converter is None:
            coding = self._checkpoint.coding(of[0])
            if coding is None:
                return None
            code = Code(coding, self._checkpoint.is_transposed(of[0]))
            return Coded(code, partial(self._checkpoint.read_parts, of[0]))
        if len(shape) != 3 or not is_stack(sources.converter):
            return None
        parts = [[source for source, of in sources.tensors if of == p] for p in sources.converter.source_patterns]
        return stack_of_codes(self._checkpoint, parts, shape)

    def _recipe_of(self, name: str, sources: _Sources) -> Recipe:
        if sources.converter is None:
            return partial(self._checkpoint.read_into, sources.tensors[0][0])
        if is_stack(sources.converter):
            return partial(self._stack, name, sources)
        return partial(self._convert, name, sources)

    def _fill_and_compare(self, name: str, fill: Recipe, twins: list[str], view: Tensor) -> None:
        """Fills a tied parameter that the checkpoint has more than once. Raises ModelRejected if the values differ."""
        fill(view)
        for twin in twins:
            other = torch.empty_like(view)
            self._recipe_of(twin, self._sources[twin])(other)
            if not torch.equal(view, other):
                raise ModelRejected(
                    f"config.json says that {name} and {twin} are one tensor, but the checkpoint has two different "
                    "ones: set tie_word_embeddings to false",
                    tensor=twin,
                )

    def _stack(self, name: str, sources: _Sources, view: Tensor) -> None:
        """Reads each expert straight into its place in the stack, without a second copy of all experts."""
        assert sources.converter is not None
        parts = [[n for n, of in sources.tensors if of == p] for p in sources.converter.source_patterns]
        rows = [self._checkpoint.tensors[part[0]].shape[0] if part else 0 for part in parts]
        if any(len(part) != view.shape[0] for part in parts) or (len(parts) > 1 and sum(rows) != view.shape[1]):
            counts = " and ".join(str(len(part)) for part in parts)
            told = f"tensors of {name} cannot be merged: there are {counts} of them for shape {list(view.shape)}"
            raise ModelRejected(told, tensor=name)
        row = 0
        for part, count in zip(parts, rows, strict=True):
            for expert, source in enumerate(part):
                place = view[expert] if len(parts) == 1 else view[expert, row : row + count]
                self._checkpoint.read_into(source, place)
            row += count

    def _convert(self, name: str, sources: _Sources, view: Tensor) -> None:
        converter = deepcopy(sources.converter)
        assert converter is not None
        for source, pattern in sources.tensors:
            read: Any = partial(self._checkpoint.read, source)
            converter.add_tensor(sources.first, source, pattern, read)
        try:
            made = converter.convert(sources.first, model=self._parameters, config=self._config)[name]
        except Exception as error:  # transformers' converters raise exceptions of many types for faulty tensors
            raise ModelRejected(f"tensors of {name} cannot be merged: {error}", tensor=name) from error
        tensor = made[0] if isinstance(made, list) else made
        if tensor.shape != view.shape:
            raise wrong_shape(name, tuple(tensor.shape), tuple(view.shape))
        view.copy_(tensor)


def is_stack(converter: WeightConverter) -> bool:
    """Returns True if the converter stacks a list of experts: one matrix of each, or several joined along dim 1."""
    first, *others = converter.operations
    if type(first) is not MergeModulelist or first.dim != 0:
        return False
    if len(converter.source_patterns) == 1:
        return not others
    return len(others) == 1 and type(others[0]) is Concatenate and others[0].dim == 1


def _match(model: Any, checkpoint: CheckpointFiles, name_of: Callable[[str], str | None]) -> dict[str, _Sources]:
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = model.state_dict()
    prefix = model.base_model_prefix
    sources: dict[str, _Sources] = {}
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        own = name_of(name)
        if own is None:
            continue
        target, pattern = rename_source_key(own, renamings, converters, prefix, known)
        if target not in known and own in known:
            target, pattern = own, None
        if target not in known:
            continue  # the model has no such parameter: masks and frequencies in old checkpoints
        converter = by_pattern[pattern] if pattern is not None else None
        for made in _made_by(converter, target):
            sources.setdefault(made, _Sources(converter, target)).tensors.append((name, pattern or name))
    return sources


def _made_by(converter: WeightConverter | None, target: str) -> list[str]:
    """Names of the parameters that a tensor contributes to. `target` is the first; a converter may split the tensor
    into several."""
    if converter is None or len(converter.target_patterns) == 1:
        return [target]
    first, *others = converter.target_patterns
    return [target, *(target.replace(first, other) for other in others)]
