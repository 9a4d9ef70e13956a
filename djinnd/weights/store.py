"""WeightStore: safetensors → flat block buffers in the arena, in parallel, with progress.

The host copy of a model is one stretch of shared memory: buffer after buffer, in the checkpoint's dtype.

    │ block 0 │ block 1 │ … │ block L-1 │ rest: embedding, final norm, head │     each starts on a page of the host

A `Recipe` says how each parameter is made from the checkpoint's tensors (renamed, or several experts merged into one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from djinn_client.errors import ModelRejected
from djinnd.weights.layout import Layout

Recipe = Callable[[], Tensor]
Progress = Callable[[int, int], None]

PAGE = 4096  # bytes: buffers are pinned one by one, and a page can be pinned once
READERS = 4  # threads; page cache and one NVMe disk are saturated by this many


@dataclass(frozen=True, slots=True)
class Buffer:
    """One block (or the rest): its layout, and where each of its parameters comes from."""

    name: str  # what all its parameters' names begin with: "model.layers.3.", or "" for the rest
    layout: Layout
    recipes: dict[str, Recipe]


class WeightStore:
    """The buffers of one model over one stretch of host memory (uint8 [nbytes], shared and page-aligned)."""

    def __init__(self, buffers: Sequence[Buffer], dtype: torch.dtype) -> None:
        self.buffers = list(buffers)
        self.dtype = dtype
        self._extents = [-(-buffer.layout.nbytes(dtype) // PAGE) * PAGE for buffer in self.buffers]  # bytes
        self.offsets = [0, *accumulate(self._extents)][:-1]
        self.nbytes = sum(self._extents)
        self._memory: Tensor | None = None

    def attach(self, memory: Tensor) -> None:
        assert memory.dtype == torch.uint8 and memory.numel() == self.nbytes, (memory.shape, self.nbytes)
        self._memory = memory

    def host(self, index: int) -> Tensor:
        """The flat host buffer of `index`: [numel] in the checkpoint's dtype."""
        assert self._memory is not None
        start = self.offsets[index]
        end = start + self.buffers[index].layout.nbytes(self.dtype)
        return self._memory[start:end].view(self.dtype)

    def pieces(self) -> list[Tensor]:
        """The host memory, a piece a buffer, each of whole pages: uint8."""
        assert self._memory is not None
        return list(self._memory.split(self._extents))

    def fill(self, progress: Progress) -> None:
        """Reads every buffer. Raises ModelRejected with the tensor at fault, or what `progress` raises; then no other
        buffer is begun, and those that were have been finished."""
        done = 0
        with ThreadPoolExecutor(READERS, "djinn-read") as readers:
            jobs = {readers.submit(self._fill_one, i): i for i in range(len(self.buffers))}
            try:
                for job in as_completed(jobs):
                    job.result()
                    done += self._extents[jobs[job]]
                    progress(done, self.nbytes)
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise

    def _fill_one(self, index: int) -> None:
        buffer = self.buffers[index]
        for name, view in buffer.layout.views(self.host(index)).items():
            tensor = buffer.recipes[name]()
            if tensor.shape != view.shape:
                raise ModelRejected(
                    f"{buffer.name}{name} has shape {list(tensor.shape)} in the checkpoint, the model wants "
                    f"{list(view.shape)}",
                    tensor=f"{buffer.name}{name}",
                )
            view.copy_(tensor)
