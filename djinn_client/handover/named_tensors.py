"""The tensors that a client shares, by the names of its state_dict: all there, or made when they are asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from djinn_client.errors import InvalidRequest, ModelRejected
from djinn_client.protocol.fields.image import Image, ImageTensor

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")


class NamedTensors:
    """The tensors by name. `known` has all of them if they exist already. `names` None: only `make` knows the names."""

    def __init__(self, make: Callable[[str], Any], names: set[str] | None, known: Mapping[str, Any] | None) -> None:
        self._make = make
        self._names = names
        self._known = known
        self.dtype = None if known is None else _commonest_dtype(known)

    @classmethod
    def of(cls, model: Any) -> NamedTensors:
        """Raises InvalidRequest."""
        if isinstance(model, Mapping):
            return cls(model.__getitem__, set(model), model if isinstance(model, dict) else None)
        if callable(getattr(model, "state_dict", None)):
            state = model.state_dict()
            return cls(state.__getitem__, set(state), state)
        if callable(model):
            return cls(model, None, None)
        raise InvalidRequest(f"a model to share is a transformers model or its tensors, not {type(model).__name__}")

    @property
    def known(self) -> Mapping[str, Any]:
        """All tensors by name; empty if they are made when they are asked for."""
        return self._known or {}

    def names_for(self, image: Image) -> dict[str, str]:
        """The first name of each tensor in the image → the name to ask for. Raises ModelRejected if a tensor is
        missing, or if the model has no place for one."""
        wanted = [tensor for buffer in image.buffers for tensor in buffer.tensors]
        if self._names is None:
            return {tensor.names[0]: tensor.names[0] for tensor in wanted}
        found = {tensor.names[0]: self._name_for(tensor, self._names) for tensor in wanted}
        _check_unused(self._names - {name for tensor in wanted for name in tensor.names}, image.unused)
        if self._known is not None:
            for tensor in wanted:
                name = found[tensor.names[0]]
                _check(name, self._known[name], tensor)
        return found

    def _name_for(self, wanted: ImageTensor, there: set[str]) -> str:
        names = [name for name in wanted.names if name in there]
        if not names:
            raise ModelRejected(
                f"the weights lack tensor {wanted.names[0]}: they go by the names of the state_dict of the "
                "transformers model",
                tensor=wanted.names[0],
            )
        self._check_tied(names)
        return names[0]

    def _check_tied(self, names: list[str]) -> None:
        """Tensors that the configuration ties must be one tensor. (Tensors that are made on demand are not
        compared.)"""
        if self._known is None:
            return
        import torch

        first = self._known[names[0]]
        for other in names[1:]:
            tensor = self._known[other]
            same = tensor is first or (tensor.shape == first.shape and tensor.data_ptr() == first.data_ptr())
            if not (same or torch.equal(tensor, first)):
                raise ModelRejected(
                    f"the configuration says that {names[0]} and {other} are one tensor, but they differ: set "
                    "tie_word_embeddings to false",
                    tensor=other,
                )

    def take(self, name: str, wanted: ImageTensor) -> Tensor:
        """Raises ModelRejected for a tensor of another form, and the maker's own exceptions."""
        tensor: Tensor = self._make(name)
        _check(name, tensor, wanted)
        return tensor.detach()


def _check_unused(names: set[str], patterns: list[str]) -> None:
    """Raises ModelRejected for a name without a place in the model, unless a pattern says that it may be ignored."""
    unused = re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)")
    extra = sorted(name for name in names if not unused.search(name))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ModelRejected(f"the model has no tensor {extra[0]}{more}: is this its configuration?", tensor=extra[0])


def _check(name: str, tensor: Any, wanted: ImageTensor) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ModelRejected(f"{name} is no tensor but {type(tensor).__name__}", tensor=name)
    if list(tensor.shape) != wanted.shape:
        raise ModelRejected(
            f"{name} has shape {list(tensor.shape)}, the model wants {wanted.shape}", tensor=name, shape=wanted.shape
        )
    if dtype_name(tensor.dtype) not in DTYPES:
        raise ModelRejected(
            f"{name} is {dtype_name(tensor.dtype)}; djinnd takes {', '.join(DTYPES)} weights", tensor=name
        )
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise ModelRejected(f"{name} has no values here (it is {tensor.device}, {tensor.layout})", tensor=name)


def _commonest_dtype(tensors: Mapping[str, Any]) -> str | None:
    """The dtype of most of the weights; None if the daemon takes none of their dtypes."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if (dtype := dtype_name(getattr(tensor, "dtype", None))) in DTYPES:
            sizes[dtype] += tensor.numel()
    return sizes.most_common(1)[0][0] if sizes else None


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
