"""Values of edits: rows as wide as an activation, from whatever holds numbers. numpy is imported when it is needed."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.image import Dtype
from djinn_client.tensors.arrays import expect_arrays

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_VALUES = 15 << 20  # bytes in one request, whose frame may have 16 MiB
MAX_POSITIONS = 3 << 20  # in one request: each takes up to 5 bytes of its frame


class Values(NamedTuple):
    """Rows of numbers: `data` has them one after another, in the dtype."""

    dtype: Dtype = "float32"
    rows: int = 0
    data: bytes = b""


def values_of(vector: Any) -> Values:
    """The bytes and the form of a torch tensor on any device, a numpy array or a sequence of numbers: [width], or
    [rows, width], also in a batch of one. float32, bfloat16 and float16 keep their dtype; other numbers become float32.

    Raises InvalidRequest for other shapes, for things that are no numbers, and for more than one request can carry."""
    array, dtype = array_of(vector)
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim not in (1, 2) or array.size == 0:
        raise InvalidRequest(
            f"the values of an edit must be [width], or [positions, width], not {list(array.shape)}", field="vector"
        )
    if array.nbytes > MAX_VALUES:
        raise InvalidRequest(
            f"the values of this edit take {array.nbytes:,} bytes, and one call can carry {MAX_VALUES:,}: make several "
            "edits of fewer positions, or hand in bfloat16",
            bytes=array.nbytes,
            limit=MAX_VALUES,
        )
    return Values(dtype, 1 if array.ndim == 1 else array.shape[0], array.tobytes())


def array_of(vector: Any) -> tuple[npt.NDArray[Any], Dtype]:
    """The numbers (bfloat16 as bits), and their dtype on the wire. Raises InvalidRequest."""
    try:
        return _of_torch(vector) if _is_tensor(vector) else _of_numpy(vector)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the values of an edit must be numbers, in rows: {error}", field="vector") from error


def dtype_of(vector: Any) -> str:
    """The name of the dtype, of a torch tensor or a numpy array; for anything else the name of its type."""
    stored: str = getattr(vector, "stored", "")
    return stored or str(getattr(vector, "dtype", type(vector).__name__)).removeprefix("torch.")


def positions_of(positions: Iterable[Any]) -> list[int]:
    """From any iterable of integers, or a 1-D array or tensor. Raises InvalidRequest, also for more than one request
    can carry."""
    listed = positions.tolist() if hasattr(positions, "tolist") else positions
    try:
        found = [operator.index(each) for each in islice(listed, MAX_POSITIONS + 1)]
    except TypeError as error:
        raise InvalidRequest(f"positions must be a row of integers: {error}", field="positions") from error
    if len(found) > MAX_POSITIONS:
        told = f"one call can carry {MAX_POSITIONS:,} positions, and these are more"
        raise InvalidRequest(told, field="positions", limit=MAX_POSITIONS)
    return found


def _is_tensor(vector: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(vector, torch.Tensor)


def _of_torch(tensor: Any) -> tuple[npt.NDArray[Any], Dtype]:
    torch = sys.modules["torch"]
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy(), "bfloat16"  # numpy has no such numbers, but their bits
    if tensor.dtype == torch.float16:
        return tensor.numpy(), "float16"
    return tensor.float().numpy(), "float32"


def _of_numpy(vector: Any) -> tuple[npt.NDArray[Any], Dtype]:
    expect_arrays("an edit's vector")
    import numpy as np

    array = np.asanyarray(vector)
    if array.dtype == np.uint16 and getattr(array, "stored", "") == "bfloat16":  # see activation.py
        return array, "bfloat16"
    if array.dtype == np.float16:
        return array, "float16"
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{array.dtype} is none")
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False), "float32"
