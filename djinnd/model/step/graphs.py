"""StepGraphs: CUDA graphs of a step. Each shape of batch has one for inputs and prologue, one a block, one for the
epilogue.

The host needs longer to launch a block's kernels one by one than the device needs to run them, for one token as for a
chunk of 512. There is a graph for each block instead of one for the model because streaming, breakpoints and steering
act between blocks. A replay costs the host 2.8 µs, so all replays of a step cost little more than one would.

Batches with adapters have shapes of their own. A model with latent attention or with states has no shapes with chunks,
because these steps read lengths on the host. shapes.py chooses the shape of a batch.

Block i + 1 reads the tensor that block i's graph writes, so nothing is copied between blocks. All graphs share one
memory pool, and any later graph may overwrite the results of an earlier one. So a step replays the graphs of its shape
in order, all of them or a range of blocks, and only `logits` is read afterwards.

Between the replays of two blocks, a probe may read and change the hidden states (model/whitebox/probe.py). A block with
a point inside it runs eagerly, and its result is copied to where its graph would write it. The host launches it while
the device still runs the blocks before it. So does a block that the host computes a part of (placing/beside_bus.py).
The epilogue runs eagerly for the points behind the blocks.

A shape is captured after its first step, which runs eagerly, or before that in an idle moment (`capture_next`). Its
kernels are compiled in advance, before a request waits for them (`compile`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from djinn_client.protocol.fields.points import Point
from djinnd.device.cuda import CudaDevice
from djinnd.model.adapter_rows import most_tiles
from djinnd.model.copies.borrowed_tensor import borrow
from djinnd.model.family.adapter import Prologue
from djinnd.model.paged_batch import PagedBatch
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.last_tokens import LastTokens
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.step.shapes import Shape, Shapes
from djinnd.model.tuning import KINDS, TILE_TOKENS
from djinnd.model.whitebox.probe import Probe, look, looks_behind, looks_inside

Behind = Callable[[Tensor], None]  # takes hidden states [1, tokens, width]


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graphs of one shape, and the tensors that they share or that are read after the step."""

    graphs: list[torch.cuda.CUDAGraph]  # prologue, one a block, epilogue
    prologue: Prologue
    resid: list[Tensor]  # hidden states at resid 0 … N; from 1 on borrowed: the pool may reuse their memory
    logits: Tensor


class StepGraphs:
    """Owns the graphs of one model, their inputs, and the memory pool that they share."""

    def __init__(
        self,
        model: PagedModel,
        device: CudaDevice,
        max_tokens: int,
        max_rows: int,
        width: int,
        max_kv: int,
        last_tokens: LastTokens | None = None,
    ) -> None:
        """width, max_kv: most pages and tokens of a row, for as long as the graphs live. `last_tokens`: for decode
        steps that are launched before the last step's tokens are read; None: there are none."""
        self._last_tokens = last_tokens
        self._model = model
        self._device = device
        self._width = width
        self._max_kv = max_kv
        self._inputs: dict[Shape, StepInputs] = {}
        self._captured: dict[Shape, _Captured] = {}
        self._is_full = False
        self._memory = torch.cuda.graph_pool_handle()
        self._shapes = Shapes(max_tokens, max_rows, self._captured, has_chunks=not (model.latents or model.has_states))
        self._in_advance = self._shapes.in_advance()  # captured from the end on

    def fitting(self, tokens: int, rows: int, longest: int, adapters: bool = False) -> Shape | None:
        """The shape as which a batch runs; None if none holds it. `longest`: tokens of its longest row."""
        shape = self._shapes.fitting(tokens, rows, longest, adapters=adapters)
        return None if shape is None else self._shapes.serving(shape)

    def inputs(self, shape: Shape) -> StepInputs:
        """The inputs of a shape, which the caller fills before `run`."""
        if shape not in self._inputs:
            tiles = most_tiles(shape.tokens, shape.rows, TILE_TOKENS) if shape.adapters else 0
            self._inputs[shape] = StepInputs(
                self._device,
                shape.tokens,
                shape.rows,
                self._width,
                tiles,
                self._model.state_tokens,
                self._last_tokens if shape.max_query == 1 else None,
            )
        return self._inputs[shape]

    def run(
        self,
        shape: Shape,
        logit_rows: int,
        probe: Probe | None = None,
        blocks: range | None = None,
        behind: Behind | None = None,
    ) -> Tensor | None:
        """Sends the filled inputs of the shape and runs the step → logits [logit_rows, vocab], or None if `logit_rows`
        is 0. `behind` is called with the result of the last block; it queues its work on the current stream.

        Replays graphs if the shape has been captured, and runs eagerly otherwise. `blocks` and `probe`: as in
        PagedModel.forward. The logits are valid until the next step. The caller may fill the inputs again after
        `StepInputs.wait`.
        """
        blocks = range(self._model.num_blocks) if blocks is None else blocks
        assert not logit_rows or blocks.stop == self._model.num_blocks, "logits need a step through the last block"
        captured, placement = self._captured.get(shape), self._model.placement
        inputs = self.inputs(shape)
        if captured is None:
            inputs.send()
            return self._run_eagerly(shape, logit_rows, probe, blocks, behind)
        prologue, *graphs, epilogue = captured.graphs
        inputs.seal()
        with self._device.span("compute", "prologue"):
            prologue.replay()
        inputs.sent()
        if blocks.start:
            captured.resid[blocks.start].copy_(captured.resid[0])
        placement.begin_pass(shape.tokens, adapters=shape.adapters)
        placement.skip(range(blocks.start))
        if probe is not None:
            look(probe, Point("resid", blocks.start), captured.resid[blocks.start])
        device = self._device
        if placement.streams or device.is_behind or device.trace is not None or probe is not None:
            for index in blocks:
                placement.begin(index)
                inside = probe if probe is not None and looks_inside(probe, index) else None
                if inside is not None or placement.is_shared(index):
                    self._model.attend(self._batch(shape))
                    given = captured.resid[index], captured.prologue.arguments[index]
                    captured.resid[index + 1].copy_(self._model.run_block(index, *given, inside))
                else:
                    graphs[index].replay()
                placement.end(index)
                if probe is not None:
                    look(probe, Point("resid", index + 1), captured.resid[index + 1])
        else:
            for graph in graphs[blocks.start : blocks.stop]:
                graph.replay()
        placement.skip(range(blocks.stop, len(graphs)))
        if behind is not None and blocks.stop == len(graphs):
            behind(captured.resid[-1])
        if not logit_rows:
            return None
        if probe is not None and looks_behind(probe):
            return self._model.logits(captured.resid[-1], inputs.logit_rows(shape.rows), probe)[:logit_rows]
        with self._device.span("compute", "epilogue"):
            epilogue.replay()
        return captured.logits[:logit_rows]

    def _run_eagerly(
        self, shape: Shape, logit_rows: int, probe: Probe | None, blocks: range, behind: Behind | None
    ) -> Tensor | None:
        model, inputs = self._model, self.inputs(shape)
        hidden = model.forward(inputs, self._batch(shape), probe, blocks)
        if behind is not None and blocks.stop == model.num_blocks:
            behind(hidden)
        return model.logits(hidden, inputs.logit_rows(shape.rows), probe)[:logit_rows] if logit_rows else None

    def _batch(self, shape: Shape) -> PagedBatch:
        return self.inputs(shape).paged_batch(max_query=shape.max_query, max_kv=self._max_kv, fresh=False)

    def wants(self, shape: Shape) -> bool:
        """Returns True if the shape has no graphs yet and memory allows more. Called after a step of the shape."""
        return shape not in self._captured and not self._is_full

    def stop_capturing(self) -> None:
        """Stops capturing because there is no memory for more. Shapes without graphs run eagerly."""
        self._is_full = True

    def compile(self) -> Iterator[None]:
        """Compiles the kernels of each shape that is captured in advance, by running the first KINDS blocks.

        A kernel that this machine has not compiled before takes a second and a half. The caller may step other models
        between two shapes. Does nothing for a model that streams.
        """
        if not self._model.placement.streams:
            for shape in self._in_advance:
                self._run_empty(shape, 0, range(min(KINDS, self._model.num_blocks)))
                yield
            self._device.synchronize()

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Captures one shape that later batches may have, in about 0.1 s. Returns False if none is left.

        Captures nothing for a model that streams, because the step before a capture would wait for the bus.
        """
        shape = None if self._is_full or self._model.placement.streams else self._next_in_advance()
        if shape is None:
            return False
        self._run_empty(shape, shape.rows, range(self._model.num_blocks))
        self.capture(shape)
        return True

    def _next_in_advance(self) -> Shape | None:
        """A shape without graphs: first those that a model begins with, then those that ran as larger ones."""
        while self._in_advance:
            shape = self._in_advance.pop()
            if shape not in self._captured:
                return shape
        return next((shape for shape in self._shapes.padded() if shape not in self._captured), None)

    def _run_empty(self, shape: Shape, logit_rows: int, blocks: range) -> None:
        inputs = self.inputs(shape)
        inputs.wait()
        inputs.pad(0, 0, 0)
        with self._device.computing(), torch.inference_mode():
            inputs.send()
            self._run_eagerly(shape, logit_rows, None, blocks, None)

    @torch.inference_mode()
    def capture(self, shape: Shape) -> None:
        """Captures the graphs of a shape. The shape must have run just before, so that its kernels are compiled and its
        libraries initialised."""
        model, adapter, inputs = self._model, self._model.adapter, self.inputs(shape)
        self._device.synchronize()
        model.attend(self._batch(shape))
        graphs: list[torch.cuda.CUDAGraph] = []
        with self._record(graphs):
            inputs.send_sealed()
            prologue = adapter.prologue(inputs.ids, inputs.positions)
        hidden = prologue.hidden
        resid = [hidden]
        for index, arguments in enumerate(prologue.arguments):
            with self._record(graphs):
                hidden = model.run_block(index, hidden, arguments)
            resid.append(borrow(hidden))
        with self._record(graphs):
            logits = adapter.epilogue(hidden.index_select(1, inputs.logit_rows(shape.rows)))
        self._captured[shape] = _Captured(graphs, prologue, resid, logits)

    def _record(self, graphs: list[torch.cuda.CUDAGraph]) -> torch.cuda.graph:
        graphs.append(torch.cuda.CUDAGraph())
        # thread_local: another thread may allocate and pin memory meanwhile, to load a model.
        return torch.cuda.graph(
            graphs[-1], pool=self._memory, stream=self._device.compute_stream, capture_error_mode="thread_local"
        )
