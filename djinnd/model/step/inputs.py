"""StepInputs: the inputs of one step, copied to the device in one piece.

Staging memory (host, pinned) and device memory have the same layout. Each array is aligned to 16 bytes, which kernels
are compiled for:

    │ words i64 [1] │ ids i64 [T] │ positions i64 [T] │ slots i64 [T] │ logit_rows i64 [max(T, R)] │ …

    … │ starts i32 [R+1] │ lengths i32 [R] │ worklist i32 [R, 4] │ extent i32 [4] │ …

    … │ states i32 [R, 2] │ order i32 [T] │ tiles i32 [A, 3] │ table i32 [R, W] │

T: tokens, R: rows, W: pages of the widest row, A: tiles of tokens with adapters (adapter_rows.py). If A is 0, `order`
is empty, too. `states` is empty for a model that keeps none.

A negative id, -1 - n, is the n-th token of the step before: the host has not read it yet. When the inputs are on the
device, the tokens take the place of such ids.

A captured graph keeps the addresses, so its inputs are allocated once and padded. The page table is by far the largest
array, and only its used rows are sent: `words` is the number of 64-bit words to send. Because the count is in the data,
a captured graph can send too, and the host launches one kernel less while the device waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinnd.device import Device
from djinnd.model.adapter_rows import NO_SLOT, TILE_FIELDS, AdapterRows, fill_tiles
from djinnd.model.attention.worklist import EXTENT, FIELDS, fill_worklist
from djinnd.model.copies.pinned_io import send_counted
from djinnd.model.paged_batch import PagedBatch
from djinnd.model.states.slots import fill_slots
from djinnd.model.step.last_tokens import LastTokens

_ALIGNMENT = 16
Array = npt.NDArray[np.int64] | npt.NDArray[np.int32]


class StepInputs:
    """Owns the host and device memory of a step's inputs, for up to `tokens` tokens, `rows` rows, `width` pages a row,
    and `tiles` tiles of tokens with adapters; 0: no token has an adapter. `state_tokens`: the tokens of a page of a
    model that keeps states; 0: it keeps none.

    The caller fills `host`, then calls `send`, or `seal` and `send_sealed` apart, and `wait` before it fills `host`
    again.
    """

    def __init__(
        self,
        device: Device,
        tokens: int,
        rows: int,
        width: int,
        tiles: int = 0,
        state_tokens: int = 0,
        last_tokens: LastTokens | None = None,
    ) -> None:
        """`last_tokens`: the tokens for negative ids; None: no id is negative."""
        self._last_tokens = last_tokens
        self.tokens, self.rows, self.width, self.tiles = tokens, rows, width, tiles
        self._state_tokens = state_tokens
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            "words": ((1,), np.int64),
            "ids": ((tokens,), np.int64),
            "positions": ((tokens,), np.int64),
            "slots": ((tokens,), np.int64),
            "logit_rows": ((max(tokens, rows),), np.int64),
            "starts": ((rows + 1,), np.int32),
            "lengths": ((rows,), np.int32),
            "worklist": ((rows, FIELDS), np.int32),
            "extent": ((EXTENT,), np.int32),
            "states": ((rows if state_tokens else 0, 2), np.int32),
            "order": ((tokens if tiles else 0,), np.int32),
            "tiles": ((tiles, TILE_FIELDS), np.int32),
            "table": ((rows, width), np.int32),
        }
        sizes = [math.prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes.values()]
        *offsets, nbytes = accumulate(map(_aligned, sizes), initial=0)
        self._staging = device.staging(nbytes)
        # Allocated on the stream that fills and reads it: memory that another stream has given back may have writes of
        # that stream before it, which the compute stream does not wait for.
        with device.computing(late=True):
            self._device_bytes = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
        self._taken = torch.cuda.Event() if self._device_bytes.is_cuda else None
        host = self._staging.numpy()
        self.host: dict[str, Array] = {}
        self._views: dict[str, Tensor] = {}
        for (name, (shape, kind)), offset, size in zip(shapes.items(), offsets, sizes, strict=True):
            self.host[name] = host[offset : offset + size].view(kind).reshape(shape)
            torch_kind = torch.int64 if kind is np.int64 else torch.int32
            self._views[name] = self._device_bytes[offset : offset + size].view(torch_kind).view(shape)
        self._table_row = width * np.dtype(np.int32).itemsize
        self._table_at = offsets[-1]

    def clear(self) -> None:
        """Sets both sides to zero: tokens of no row, and rows without tokens. `send` cannot do this for the device
        while launches of kernels are listed, because they are skipped (kernels/launching/launches.py)."""
        self._staging.zero_()
        self._device_bytes.zero_()

    def send(self) -> None:
        """Queues the copy on the current stream. Until `wait` has returned, the caller leaves the host side unchanged
        and keeps this object."""
        self.seal()
        self.send_sealed()
        self.sent()

    def seal(self) -> None:
        """Completes a filled host side: computes `worklist`, `extent`, `states`, and the number of words to send."""
        host = self.host
        rows = fill_worklist(host["starts"], host["lengths"], host["worklist"], host["extent"])
        if self._state_tokens:
            fill_slots(host["lengths"], host["table"], self._state_tokens, host["states"])
        host["words"][0] = (self._table_at + _aligned(rows * self._table_row)) // 8

    def send_sealed(self) -> None:
        """Queues the copy of a sealed host side. A graph that captured this call copies the contents of the host side
        at the time of the replay."""
        send_counted(self._device_bytes, self._staging)
        if self._last_tokens is not None:
            self._last_tokens.feed(self._views["ids"])

    def sent(self) -> None:
        """Records the event that `wait` waits for."""
        if self._taken is not None:
            self._taken.record()

    def wait(self) -> None:
        """Waits until the device has the last inputs, which it takes at the start of their step. The host side may then
        be filled again."""
        if self._taken is not None:
            self._taken.synchronize()

    @property
    def ids(self) -> Tensor:
        return self._views["ids"].unsqueeze(0)

    @property
    def positions(self) -> Tensor:
        return self._views["positions"].unsqueeze(0)

    @property
    def slots(self) -> Tensor:
        """int64 [tokens]: slots to which attention writes the tokens' keys and values. Kernels read it as they run."""
        return self._views["slots"]

    def logit_rows(self, count: int) -> Tensor:
        """int64 [count]: indices of the tokens that need logits."""
        return self._views["logit_rows"][:count]

    def fill_adapters(self, slots: Sequence[int], counts: Sequence[int], size: int) -> None:
        """Fills the host side for rows with these slots and counts of tokens; see fill_tiles."""
        fill_tiles(slots, counts, size, self.host["order"], self.host["tiles"])

    def paged_batch(self, *, max_query: int, max_kv: int, fresh: bool) -> PagedBatch:
        """Where the tokens are in the pages, within these bounds (see PagedBatch). Kernels read it as they run."""
        return PagedBatch(
            query_starts=self._views["starts"],
            kv_lengths=self._views["lengths"],
            page_table=self._views["table"],
            worklist=self._views["worklist"],
            extent=self._views["extent"],
            slots=self.slots,
            max_query=max_query,
            max_kv=max_kv,
            fresh=fresh,
            states=self._views["states"] if self._state_tokens and max_query == 1 else None,
            adapters=AdapterRows(self._views["order"], self._views["tiles"]) if self.tiles else None,
        )

    def pad(self, tokens: int, rows: int, logit_rows: int) -> None:
        """Fills the host side behind the first `tokens`, `rows` and `logit_rows` with padding: tokens of no row, with
        slots in the scratch page, and rows without tokens."""
        host = self.host
        if tokens < self.tokens:
            for name in ("ids", "positions", "slots"):
                host[name][tokens:] = 0
        if logit_rows < max(self.tokens, self.rows):
            host["logit_rows"][logit_rows:] = 0
        host["starts"][rows:] = tokens
        host["lengths"][rows:] = 0
        if not rows:
            host["tiles"][:, 0] = NO_SLOT


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
