"""KV of a session in this process's memory: `Session.kv()` gives it, and `from_kv` hands it to the daemon.

kv = s.kv()                                    one copy over the bus, into a window that is mapped here
w = kv_window("djinn-tiny", tokens=n)          a window for KV that is computed here: filled in place
s = from_kv("djinn-tiny", tokens, w)           …and uploaded by the daemon from the very memory
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from djinn_client.admin.client import Client
from djinn_client.errors import InvalidRequest, OutOfMemory, PromptTooLong, ProtocolError
from djinn_client.protocol import SessionExported
from djinn_client.protocol.fields.kv_layout import ITEM_BYTES, LARGEST, KvLayout
from djinn_client.tensors.arrays import fill, window_array
from djinn_client.tensors.values import dtype_of
from djinn_client.transport.exchange import close_all
from djinn_client.transport.shm import map_window, map_writable, new_window, seal_for_writers

if TYPE_CHECKING:
    from djinn_client.transport.connection import OnProgress


class KV:
    """KV of the first `length` tokens of a session, in the pages of the daemon's pool.

    pages    [pages, blocks, 2, page_size, kv_heads, head_dim], row-major, K before V, in `layout.dtype`: a torch
             tensor, or without torch a numpy array (bfloat16 then as uint16, FP8 as uint8). Writable, and this
             process's own: what is written changes no session. What is behind the last token of the last page is
             undefined. If the blocks of the model are not alike, or it keeps a state: [pages, elements of a page],
             with regions as `layout` says.
    tokens   the token ids that the KV belongs to; None in a KvWindow

    Keys are as attention reads them: with the rotary embedding of their positions, where the model has one. With latent
    attention (MLA), the key of a block is its latent, and the value is the rotary part of its keys.
    """

    tokens: list[int] | None

    def __init__(self, layout: KvLayout, length: int, memory: memoryview, tokens: list[int] | None) -> None:
        self.layout = layout
        self.length = length
        self.tokens = tokens
        self.memory = memory
        self.pages = window_array(memory, layout.dtype, layout.shape(length))

    @property
    def page_size(self) -> int:
        """Tokens."""
        return self.layout.page_size

    def key(self, block: int) -> Any:
        """[tokens, heads, width], gathered: a copy. Raises InvalidRequest for a block without KV."""
        return self._gather(block, 0)

    def value(self, block: int) -> Any:
        """[tokens, heads, width], gathered: a copy. Raises InvalidRequest for a block without KV."""
        return self._gather(block, 1)

    def put(self, block: int, key: Any, value: Any) -> None:
        """Writes the keys and the values of one block into the pages, each [tokens, heads, width] of any dtype that
        converts; FP8 holds at most 448. Raises InvalidRequest for another shape."""
        regions = [(self._region(block, which), source) for which, source in enumerate((key, value))]
        for name, (pages, source) in zip(("keys", "values"), regions, strict=True):
            shape = (self.length, *pages.shape[2:])
            if tuple(source.shape) != shape:
                raise InvalidRequest(
                    f"the {name} of block {block} must be {list(shape)}, not {list(source.shape)}", field="kv"
                )
        full, rest = divmod(self.length, self.page_size)
        for pages, source in regions:
            source = self._within_range(source)
            pages[:full] = source[: full * self.page_size].reshape(full, *pages.shape[1:])
            if rest:
                pages[full, :rest] = source[full * self.page_size :]

    def _within_range(self, source: Any) -> Any:
        """FP8 has no number beyond LARGEST, and some versions of torch make NaN of it. An array has codes."""
        most = LARGEST.get(self.layout.dtype)
        return source.float().clip(-most, most) if most is not None and hasattr(source, "float") else source

    def _gather(self, block: int, which: int) -> Any:
        pages = self._region(block, which)
        return pages.reshape(-1, *pages.shape[2:])[: self.length]

    def _region(self, block: int, which: int) -> Any:
        """A view of the pages of one block's keys or values, [pages, page_size, heads, width]."""
        layout = self.layout
        if len(self.pages.shape) > 2:
            return self.pages[:, block, which]
        pair = layout.regions[block]
        if pair is None:
            raise InvalidRequest(f"block {block} has no KV", field="block")
        region, itemsize = pair[which], ITEM_BYTES[layout.dtype]
        first, values = region.offset // itemsize, layout.page_size * region.heads * region.width
        shape = (-1, layout.page_size, region.heads, region.width)
        return self.pages[:, first : first + values].reshape(shape)  # the last dimension is only divided: no copy

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.length:,} tokens: {self.layout}>"


class KvWindow(KV):
    """A window of this process, for KV that it computes: to be filled in place, then handed over by `from_kv`, once or
    more often. The daemon reads it while `from_kv` runs, and not any more when that has returned."""

    def __init__(self, layout: KvLayout, length: int) -> None:
        """Raises OutOfMemory."""
        nbytes = layout.nbytes(length)
        try:
            self.fd = new_window("djinn-kv", nbytes)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(f"no memory for a window of {nbytes:,} bytes: {error}", needed=nbytes) from error
        self._closer = weakref.finalize(self, os.close, self.fd)
        super().__init__(layout, length, map_writable(self.fd, nbytes), None)
        seal_for_writers(self.fd)

    @property
    def closed(self) -> bool:
        return not self._closer.alive

    def close(self) -> None:
        """Closes the descriptor; the memory goes with the last tensor over it."""
        self._closer()


def exported_kv(reply: SessionExported, fds: list[int]) -> KV:
    """Maps the window that the daemon passed. Closes `fds`. Raises ProtocolError."""
    try:
        if reply.kv is None or len(fds) != 1:
            raise ProtocolError(f"the KV of a session came with {len(fds)} file descriptors")
        nbytes = reply.kv.nbytes(reply.kv_tokens)
        return KV(reply.kv, reply.kv_tokens, map_window(fds[0], nbytes), reply.token_ids[: reply.kv_tokens])
    finally:
        close_all(fds)


def kv_window(
    model: str,
    tokens: int,
    *,
    address: str | None = None,
    token: str | None = None,
    on_progress: OnProgress | None = None,
) -> KvWindow:
    """An empty window for the KV of `tokens` tokens of a model, which is loaded first if necessary. Raises
    InvalidRequest for 0 tokens, PromptTooLong for more than the model's context, OutOfMemory, and what loading
    raises."""
    if tokens < 1:
        raise InvalidRequest(f"a window for {tokens} tokens; it must be for 1 or more", field="tokens")
    with Client(address, token=token) as client:
        loaded = client.load(model, on_progress=on_progress)
    if tokens > loaded.max_context:
        raise PromptTooLong(
            f"a window for {tokens:,} tokens; the context of {loaded.name} has {loaded.max_context:,}",
            tokens=tokens,
            max_context=loaded.max_context,
        )
    return KvWindow(loaded.kv_layout, tokens)


def window_with(
    model: str, tokens: list[int], kv: Any, address: str | None, token: str | None, on_progress: OnProgress | None
) -> KvWindow:
    """`kv` itself if it is a window, or else copied into one. Raises InvalidRequest if it does not fit the tokens."""
    if isinstance(kv, KvWindow):
        if kv.closed:
            raise InvalidRequest(
                f"the window of {kv.length:,} tokens was closed, so it cannot be handed over: close it behind from_kv, "
                "or give its pages, which are copied then",
                field="kv",
            )
        window = kv
    elif isinstance(kv, KV):
        window = KvWindow(kv.layout, kv.length)
        window.pages[:] = kv.pages
    else:
        window = kv_window(model, max(1, len(tokens)), address=address, token=token, on_progress=on_progress)
        _copy_pages(window, kv)
    if not 0 < window.length <= len(tokens):
        raise InvalidRequest(
            f"the window has the KV of {window.length:,} tokens, and {len(tokens):,} tokens came with it: every token "
            "whose KV is handed over must be named",
            field="tokens",
        )
    return window


def _copy_pages(window: KvWindow, pages: Any) -> None:
    form, given = (f"{dtype_of(each)} {list(getattr(each, 'shape', ()))}" for each in (window.pages, pages))
    if given != form:
        raise InvalidRequest(
            f"the pages must be {form} (pages, blocks, 2, page_size, kv_heads, head_dim, or pages and their elements "
            f"if the blocks are not alike), not {given}",
            field="kv",
        )
    fill(window.pages, pages)
