"""Arrays over windows from the daemon, without a copy. numpy and torch are imported at first use."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from djinn_client.errors import ProtocolError
from djinn_client.protocol import Logits
from djinn_client.protocol.fields.kv_layout import KvDtype
from djinn_client.transport.exchange import close_all
from djinn_client.transport.shm import map_window

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

FLOAT32 = 4  # bytes

_OF_NUMPY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}  # it has no such floats


def expect_arrays(what: str) -> None:
    """Raises ImportError with the remedy if numpy, which `what` needs, is missing. djinn_client is installed without
    numpy, which is larger than all the rest. Calls that return numbers check this before they send anything, so the
    daemon computes nothing that the caller cannot read."""
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{what} needs numpy: pip install 'djinn-client[tensors]'", name="numpy") from error


def logits_array(reply: Logits, fds: list[int]) -> npt.NDArray[np.float32]:
    """The logits as float32 [tokens, vocab], writable; changes stay in this process. Closes `fds`.

    Raises ProtocolError where the bytes are not what the reply announces.
    """
    import numpy as np

    shape = (reply.tokens, reply.vocab)
    nbytes = reply.tokens * reply.vocab * FLOAT32
    try:
        if min(shape) < 0 or len(fds) != (reply.inline is None and nbytes > 0):
            raise ProtocolError(f"logits of shape {shape} came with {len(fds)} file descriptors")
        if nbytes == 0:
            return np.empty(shape, np.float32)
        if reply.inline is None:
            return np.frombuffer(map_window(fds[0], nbytes), np.float32).reshape(shape)
        if len(reply.inline) != nbytes:
            raise ProtocolError(f"logits of shape {shape} came in {len(reply.inline):,} bytes, not {nbytes:,}")
        return np.frombuffer(bytearray(reply.inline), np.float32).reshape(shape)
    finally:
        close_all(fds)


def as_torch(array: npt.NDArray[np.float32]) -> torch.Tensor:
    """The same memory as a CPU tensor. Needs torch, which djinn_client otherwise does without."""
    import torch

    return torch.from_numpy(array)


def window_array(memory: memoryview, dtype: KvDtype, shape: tuple[int, ...]) -> Any:
    """The same memory as a torch tensor; without torch as a numpy array, and then bfloat16 as uint16 and
    FP8 as uint8."""
    if importlib.util.find_spec("torch") is None:
        expect_arrays("this tensor")
        import numpy as np

        return np.frombuffer(memory, _OF_NUMPY.get(dtype, dtype)).reshape(shape)
    import torch

    return torch.frombuffer(memory, dtype=getattr(torch, dtype)).view(shape)


def fill(target: Any, source: Any) -> None:
    """Copies an array or a tensor of any device into one of `window_array`, of the same shape and dtype."""
    if importlib.util.find_spec("torch") is None:
        target[:] = source
        return
    import torch

    target.copy_(torch.as_tensor(source))
