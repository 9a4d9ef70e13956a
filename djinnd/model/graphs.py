"""CUDA graphs for decode: one for the prologue, one a block, one for the epilogue, for each bucket of rows.

A graph a block and not one for the model, because streaming, breakpoints and steering live on block boundaries; all
replays of a step together cost the host little more than one (2.8 µs each). Block i + 1 reads the tensor that block i's
graph writes: outputs stay where they are for as long as the graphs live, so nothing is copied between blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from djinnd.device.cuda import CudaDevice
from djinnd.model.adapter import Prologue
from djinnd.model.inputs import StepInputs
from djinnd.model.paged_model import PagedModel

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
EAGER_LOAD = 64  # buckets up to this are captured at load, the others when first needed


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The captured step for up to so many sessions that decode. Holds all tensors that one graph leaves for another."""

    inputs: StepInputs
    graphs: list[torch.cuda.CUDAGraph]
    prologue: Prologue
    hidden: list[Tensor]
    logits: Tensor


class DecodeGraphs:
    """Owns the graphs of one model and the memory pool that they share."""

    def __init__(self, model: PagedModel, device: CudaDevice, max_rows: int, width: int, max_kv: int) -> None:
        """`width` pages and `max_kv` tokens bound every row for as long as the graphs live."""
        self._model = model
        self._device = device
        self._width = width
        self._max_kv = max_kv
        self._sizes = [size for size in BUCKETS if size < max_rows] + [max_rows]
        self._buckets: dict[int, _Bucket] = {}
        self._memory = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):  # large first: smaller ones reuse what the pool has
            if size <= EAGER_LOAD:
                self._capture(size)

    def inputs(self, rows: int) -> StepInputs:
        """Where to put a batch of so many rows; `replay` with the same count runs it."""
        return self._bucket(rows).inputs

    def replay(self, rows: int) -> Tensor:
        """→ logits [rows, vocab], valid until the next replay of any bucket."""
        bucket = self._bucket(rows)
        for graph in bucket.graphs:
            graph.replay()
        return bucket.logits[:rows]

    def _bucket(self, rows: int) -> _Bucket:
        size = self._sizes[bisect_left(self._sizes, rows)]
        if size not in self._buckets:
            self._capture(size)
        return self._buckets[size]

    @torch.inference_mode()
    def _capture(self, rows: int) -> None:
        model, adapter = self._model, self._model.adapter
        inputs = StepInputs(self._device, rows, rows, self._width)
        inputs.fill_padding(0, 0)
        inputs.host["starts"][0] = 0
        inputs.host["picks"][:] = range(rows)
        with self._device.computing():
            inputs.send()
            # Kernels are compiled and libraries set up outside of the capture.
            model.logits(model.forward(inputs, max_query=1, max_kv=self._max_kv, fresh=False), inputs.picks(rows))
        self._device.synchronize()
        graphs: list[torch.cuda.CUDAGraph] = []
        with self._record(graphs):
            prologue = adapter.prologue(inputs.ids, inputs.positions)
        hidden = [prologue.hidden]
        for index, arguments in enumerate(prologue.arguments):
            with self._record(graphs):
                hidden.append(adapter.run_block(index, hidden[-1], arguments))
        with self._record(graphs):
            logits = adapter.epilogue(hidden[-1])
        self._buckets[rows] = _Bucket(inputs, graphs, prologue, hidden, logits)

    def _record(self, graphs: list[torch.cuda.CUDAGraph]) -> torch.cuda.graph:
        graphs.append(torch.cuda.CUDAGraph())
        # thread_local: a thread that loads another model may allocate and pin meanwhile.
        return torch.cuda.graph(
            graphs[-1], pool=self._memory, stream=self._device.compute_stream, capture_error_mode="thread_local"
        )
