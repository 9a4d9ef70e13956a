"""Runs a batch on one model: rows in, sampled tokens out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from djinn_client.protocol import ModelInfo
from djinnd.core.batch import Batch, blocks_of
from djinnd.core.edits import Edit
from djinnd.core.request import Request
from djinnd.device import Device
from djinnd.device.cuda import CudaDevice
from djinnd.engine.adapters.residency import AdapterResidency
from djinnd.engine.memory.memory import KvPlan, ModelShape, workspace_bytes
from djinnd.engine.probes.captures import Captures
from djinnd.engine.probes.edit_table import EditTable
from djinnd.engine.probes.parked_states import ParkedStates
from djinnd.engine.probes.partial_rows import with_partial_rows
from djinnd.engine.probes.step_probe import Part, Touched
from djinnd.engine.run.batch_inputs import Rows, compose, in_order, told_positions
from djinnd.engine.run.guessed_rows import of_rows, of_samples, sampled_tokens, samples_of
from djinnd.engine.run.logit_rows import LogitRows
from djinnd.engine.run.logits_window import LogitsWindow
from djinnd.engine.run.prompt_scores import PromptScorer
from djinnd.engine.tuning import RESIZED_AT_ONCE
from djinnd.kvcache.manager import KvManager
from djinnd.messages import Load
from djinnd.model.adapter_rows import most_tiles
from djinnd.model.placing.loader import Weights
from djinnd.model.sampling.sampler import Sampled, Sampler
from djinnd.model.sampling.token_masks import RowMasks
from djinnd.model.step.graphs import Shape, StepGraphs
from djinnd.model.step.inputs import StepInputs
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import TILE_TOKENS
from djinnd.model.whitebox.probe import Probe
from djinnd.weights.plan import BlockPlace, PlacementPlan

log = logging.getLogger("djinnd.engine")

FindMasks = Callable[[Rows, Callable[[], bool]], RowMasks | None]


@dataclass(eq=False)
class ModelRunner:
    """Owns the device memory of one served model: weights, KV pool, CUDA graphs, sampler. Owns its block tables too."""

    load: Load
    weights: Weights
    model: PagedModel
    shape: ModelShape
    plan: KvPlan
    device: Device
    max_tokens: int  # of a step
    max_rows: int

    def __post_init__(self) -> None:
        model, plan, device = self.model, self.plan, self.device
        self.name = self.weights.name
        has_states = bool(model.skeleton.stateful)
        self.kv = KvManager(plan.num_pages, plan.page_size, plan.page_bytes, plan.max_context, keeps_states=has_states)
        with device.computing():
            self.sampler = Sampler(model.vocab, device.torch_device)
        self.windows: dict[int, LogitsWindow] = {}  # by request: the logits of forward passes that run
        self.scores = PromptScorer()
        points = model.skeleton.points
        self.edits = EditTable(device, self.name, points.width, points.vocab)
        self.captures = Captures(device, self.name, points.width, points.vocab, model.dtype)
        self.adapters = AdapterResidency(device, self.name, model, self.load.placing.adapter_bytes)
        self.parked = ParkedStates(device, self.name, points.width, model.dtype)
        self._touched: Touched | None = None  # the last batch that edits or captures may have touched
        self._is_eager = False
        self._tile_tokens = TILE_TOKENS if device.torch_device.type == "cuda" else self.max_tokens
        self.graphs = self._new_graphs()
        self._ran: Shape | None = None  # shape of the last step, until `settle`
        self._inputs: StepInputs | None = None  # inputs of the last pass; the device may still read them

    def _new_graphs(self) -> StepGraphs | None:
        if self._is_eager or not isinstance(self.device, CudaDevice):
            return None
        context = self.plan.max_context
        limits = self.max_tokens, self.max_rows, self.kv.pages_for(context), context
        return StepGraphs(self.model, self.device, *limits)

    def run_without_graphs(self) -> None:
        """Drops the graphs for good: a step of this model needs code that cannot be captured."""
        self.graphs = None
        self._is_eager = True

    def compile(self) -> Iterator[None]:
        """Loads the kernels that steps use, before a request waits for one; see StepGraphs.compile."""
        if (graphs := self.graphs) is not None:
            parts = (True for _ in graphs.compile())
            while self._attempt(graphs, partial(next, parts, False)):
                yield

    def prepare(self) -> bool:
        """Captures one graph that later steps may use, in about a tenth of a second. → False if there is none left."""
        return self.graphs is not None and self._attempt(self.graphs, self.graphs.capture_next)

    def _attempt(self, graphs: StepGraphs, capture: Callable[[], object]) -> bool:
        """Calls `capture`. A family whose forward pass cannot be captured runs eagerly from then on. → True if it did
        something."""
        try:
            return bool(capture())
        except torch.OutOfMemoryError as error:
            log.warning("graphs_full model=%s error=%s", self.name, error)
            graphs.stop_capturing()
        except RuntimeError as error:
            self.device.synchronize()  # raises again if the error is permanent
            log.warning("graphs_off model=%s error=%s", self.name, error)
            self.graphs = None
        self.recover()
        return False

    @property
    def speculates(self) -> bool:
        """True if steps may run guesses. The states of a hybrid model cannot be taken back. On a GPU, a step with
        guesses needs a graph, unless weights stream: models with latent attention have no graphs for it."""
        if not self.load.placing.speculation or self.model.has_states:
            return False
        on_gpu = isinstance(self.device, CudaDevice)
        return not on_gpu or self.model.placement.streams or not (self._is_eager or self.model.latents)

    def page_bytes(self) -> Tensor:
        """The current pool, uint8 [pages, page_bytes]."""
        return self.model.pool

    @property
    def half_bytes(self) -> int:
        """Bytes of a page, from its beginning, that hold the KV of the blocks before WeightPlacement.half. 0 for a
        hybrid model: the states of all blocks are at the end of a page."""
        if self.model.has_states:
            return 0
        return self.model.first_byte(self.weights.placement.half)

    @property
    def pool_bytes(self) -> int:
        return self.plan.num_pages * self.plan.page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the device's budget that the model takes."""
        touched = self.edits.nbytes + self.captures.nbytes + self.parked.nbytes
        touched += self.adapters.nbytes
        return self.weights.nbytes + self.pool_bytes + workspace_bytes(self.shape, self.max_tokens) + touched

    def move(self, places: PlacementPlan, num_pages: int) -> None:
        """Between two steps: moves blocks to their places, and pages in use into a pool of `num_pages`, which counts
        the scratch page. Parts that shrink go first, to make room."""
        placement = self.weights.placement
        self.graphs = None  # graphs hold addresses, and memory
        self.device.synchronize()
        placement.make_room(places)
        if num_pages != self.plan.num_pages:
            self._resize_pool(num_pages)
        placement.move(places)
        self.graphs = self._new_graphs()

    @torch.inference_mode()
    def _resize_pool(self, num_pages: int) -> None:
        moved = self.kv.resize(num_pages)
        device = self.model.pool.device
        old, new = (torch.tensor(list(pages), dtype=torch.long, device=device) for pages in (moved, moved.values()))
        shape = (num_pages, self.model.layout.page_bytes)
        fits = num_pages * self.plan.page_bytes <= self.device.budget.free
        if fits:
            kept = self.model.pool
        else:  # by way of the host
            kept, old = self.model.pool.index_select(0, old).cpu(), torch.arange(len(moved))
            self.model.use_pool(self.model.pool[:0].clone())
            self.device.release(kv_label(self.name))
            self.device.trim()
        pool = self.device.allocate(f"new {kv_label(self.name)}", shape, torch.uint8, zero=True)
        for some, there in zip(old.split(RESIZED_AT_ONCE), new.split(RESIZED_AT_ONCE), strict=True):
            pool.index_copy_(0, there, kept.index_select(0, some).to(pool.device))
        self.device.synchronize()
        self.model.use_pool(pool)
        del kept
        if fits:
            self.device.release(kv_label(self.name))
        self.device.trim()
        self.device.budget.rename(f"new {kv_label(self.name)}", kv_label(self.name))
        self.plan = replace(self.plan, num_pages=num_pages)

    def recover(self) -> None:
        """Resets the model after a step that failed."""
        self.scores.clear()
        self.model.placement.restart()

    def copy_page(self, source: int, target: int) -> None:
        """Between two steps: copies a whole page, in order with the work that the device still has."""
        with self.device.computing():
            self.model.copy_page(source, target)

    @torch.inference_mode()
    def run(
        self, batch: Batch, meanwhile: Callable[[], bool] = lambda: False, masks: FindMasks | None = None
    ) -> Sampled:
        """Runs one step: samples a token for every row that samples, in the order of the rows, and writes the logits of
        forward passes to their windows.

        `meanwhile`: called while the device works, and again as long as it returns True. `masks`: finds the grammar
        masks of rows that sample; None: no request has a grammar.
        """
        self._ran = None
        with self.device.computing(late=True):
            stale = self.kv.pool.take_stale()
            if stale:
                self.device.catch_up()  # a copy into a page that has changed hands must not land after the zeros
                self.model.zero_pages(stale)
            touched = self._touch(batch) if self.edits or self._captures_in(batch) else None
            rows, logits = self._passes(batch.rows, touched)
            self.device.catch_up()  # all rows may have ended before the block where a full pass catches up
            if logits is None:
                return Sampled([], [], [])
            sampling = [row for row in rows if row.samples]
            masked = None
            if masks is not None:
                with self.device.span("compute", "masks"):  # for as long as the device has to wait for them
                    masked = masks(sampling, meanwhile)
            sampled = self._sample(logits, sampling, meanwhile, masked)
            self._inputs = None  # the device has read them
            return sampled if rows is batch.rows else in_order(sampled, sampling, batch.rows)

    def _sample(self, logits: Tensor, sampling: Rows, meanwhile: Callable[[], bool], masks: RowMasks | None) -> Sampled:
        """Samples a token for each of these rows. A row with a right guess gets further tokens."""
        if not any(row.guess for row in sampling):
            return self.sampler.sample(logits, [row.session for row in sampling], meanwhile, masks)
        sessions, ahead = samples_of(sampling)
        masks = None if masks is None else of_samples(masks, sampling)
        return of_rows(self.sampler.sample(logits, sessions, meanwhile, masks, ahead), sampling)

    def use_edits(self, session: str, edits: tuple[Edit, ...]) -> None:
        """Sets the session's edits from the next step on. Raises OutOfMemory if their values have no room, and then the
        session has none."""
        if self.edits.of(session) != edits:
            self._touched = None  # the values that it refers to may move or go
            self.edits.set(session, edits)

    def _captures_in(self, batch: Batch) -> bool:
        """True if a request of the batch captures. Requests that have ended can still be in `captures`, while their
        rows are copied out."""
        return bool(self.captures) and any(row.request.id in self.captures for row in batch.rows)

    def _touch(self, batch: Batch) -> Touched:
        touched, self._touched = self._touched, None
        if touched is None or not touched.lasts(batch):
            touched = Touched(self.device, batch, self.edits, self.captures)
        if not self.captures:  # captured rows move when others' captures come or go
            self._touched = touched
        return touched

    def _passes(self, rows: Rows, touched: Touched | None) -> tuple[Rows, Tensor | None]:
        """Runs the batch. → the rows in the order of the passes, and the logits of rows that sample, or None.

        Rows that need more than a graph gives run eagerly. They get a pass of their own, so that the other rows keep
        the graph. If weights stream, all rows run eagerly together, because each pass over the blocks costs the bus.
        """
        whole = None if touched is None else touched.part(range(len(rows)))
        if self.graphs is None or (_have_adapters(rows) and not self.adapters.can_be_captured):
            return rows, self._mixed(rows, whole)
        behind = frozenset[int]() if touched is None else touched.behind
        apart = [
            i for i, row in enumerate(rows) if i in behind or (row.request.wants_prompt_logits and told_positions(row))
        ]
        if not apart:
            return rows, self._replay(rows, whole)
        if len(apart) == len(rows) or self.model.placement.streams:
            return rows, self._mixed(rows, whole)
        others = sorted(set(range(len(rows))).difference(apart))
        first, last = (None if touched is None else touched.part(some) for some in (others, apart))
        order = [rows[index] for index in (*others, *apart)]
        given = [self._replay(order[: len(others)], first), self._mixed(order[len(others) :], last)]
        logits = [some for some in given if some is not None]
        return order, torch.cat(logits) if logits else None

    def _replay(self, rows: Rows, part: Part | None) -> Tensor | None:
        """Replays a graph for these rows. None of them is edited or captured after the last block. → the logits of
        rows that sample, or None."""
        graphs = self.graphs
        assert graphs is not None
        counts = [row.count for row in rows]
        sampling = sampled_tokens(rows)  # a graph has logits for as many tokens as rows
        shape = graphs.fitting(sum(counts), max(len(rows), len(sampling)), max(counts), _have_adapters(rows))
        if shape is None:
            return self._mixed(rows, part)
        inputs = graphs.inputs(shape)
        self._compose(inputs, rows)
        inputs.host["logit_rows"][: len(sampling)] = sampling
        inputs.pad(sum(counts), len(rows), len(sampling))
        probe = self._probe(inputs, rows, part)
        blocks = blocks_of(rows)
        if len(blocks) == self.model.num_blocks:
            self._ran = shape
        return graphs.run(shape, len(sampling), probe, blocks)

    def settle(self) -> None:
        """After a step, when its results have been sent: captures a graph for the step's shape, if that pays."""
        graphs, shape, self._ran = self.graphs, self._ran, None
        if graphs is not None and shape is not None and graphs.wants(shape):
            self._attempt(graphs, lambda: graphs.capture(shape))

    def _mixed(self, rows: Rows, part: Part | None) -> Tensor | None:
        """Runs these rows eagerly. → the logits of rows that sample, or None."""
        counts = [row.count for row in rows]
        width, tiles = max(self.kv.pages_held(row.session.id) for row in rows), 0
        if _have_adapters(rows):
            tiles = most_tiles(sum(counts), len(rows), self._tile_tokens)
        inputs = StepInputs(self.device, sum(counts), len(rows), width, tiles, self.model.state_tokens)
        self._compose(inputs, rows)
        ends = list(accumulate(counts))
        sampling = sampled_tokens(rows)
        told = [at + end - row.end for row, end in zip(rows, ends, strict=True) for at in told_positions(row)]
        seen = [] if part is None else part.seen_behind(sampling)
        logit_rows = LogitRows(self.model, inputs, part, [*sampling, *told, *seen])
        probe = self._probe(inputs, rows, part)
        inputs.send()
        longest, fresh = max(row.end for row in rows), all(row.start == 0 for row in rows)
        batch = inputs.paged_batch(max_query=max(counts), max_kv=longest, fresh=fresh)
        logit_rows.hidden = self.model.forward(inputs, batch, probe, blocks_of(rows))
        logits = logit_rows.logits(0, len(sampling)) if sampling else None
        self._tell_logits(logit_rows, len(sampling), rows)
        for _ in logit_rows.pieces(len(sampling) + len(told), len(seen)):
            pass  # the probe reads them
        return logits

    def _probe(self, inputs: StepInputs, rows: Rows, part: Part | None) -> Probe | None:
        """The probe of a pass's prologue and blocks. `inputs` have been filled for the pass."""
        probe = None if part is None else part.probe()
        if not self.parked and not self.captures:  # a row that will wait is captured, one that has waited is parked
            return probe
        return with_partial_rows(self.device, inputs, self.parked, rows, self.model.num_blocks, probe)

    def _tell_logits(self, logit_rows: LogitRows, first: int, rows: Rows) -> None:
        """Writes the logits from entry `first` of `logit_rows` on to the windows of forward passes, and scores the
        prompts that want it."""
        for row in rows:
            positions = told_positions(row)
            if not positions:
                continue
            pieces = logit_rows.pieces(first, len(positions))
            if row.request.logits:
                position = positions.start - row.request.first
                for logits in pieces:
                    self.windows[row.request.id].write(position, logits)
                    position += len(logits)
            else:
                self.scores.add(row, positions, pieces)
            first += len(positions)

    def _compose(self, inputs: StepInputs, rows: Rows) -> None:
        """Fills `inputs`. If the host has not read the last pass's results (chunks of a long prompt), it first waits
        until the device has taken the last inputs, which may be the same buffers. So the host is at most one pass
        ahead."""
        if self._inputs is not None:
            self._inputs.wait()
        self._inputs = inputs
        compose(inputs, rows, self.kv.page_table([row.session.id for row in rows]), self.plan.page_size)
        if inputs.tiles:
            inputs.fill_adapters(self.adapters.slots_of(rows), [row.count for row in rows], self._tile_tokens)

    def open_window(self, request: Request) -> None:
        """Raises OSError or OutOfMemory if the host has no memory for the logits."""
        self.windows[request.id] = LogitsWindow(request.prompt_end - request.first, self.model.vocab)

    def forget(self, request: Request) -> LogitsWindow | None:
        """Drops the state of a request that has ended. → its window, if it had one; the caller owns it."""
        self.sampler.forget(request)
        return self.windows.pop(request.id, None)

    def release(self) -> None:
        """Gives the device memory back. The runner must not be used afterwards."""
        for window in self.windows.values():
            window.close()
        self.graphs = None
        self._touched = None
        self.edits.release()
        self.captures.release()
        self.parked.release()
        self.adapters.release()
        self.weights.release(self.device)
        self.device.release(kv_label(self.name))
        self.device.release(workspace_label(self.name))

    @property
    def places(self) -> PlacementPlan:
        plan = self.weights.placement.plan
        assert plan is not None
        return plan

    def info(self) -> ModelInfo:
        kv, places = self.kv, self.places
        return ModelInfo(
            name=self.name,
            path=self.load.path,
            family=self.model.skeleton.family,
            state="ready",
            dtype=str(self.model.dtype).removeprefix("torch."),
            codes=self.weights.store.codes,
            quantised=self.load.placing.quantise,
            kv_dtype=self.load.placing.kv_dtype,
            parameters=self.weights.parameters,
            blocks=self.model.num_blocks,
            vocab=self.model.vocab,
            points=self.model.skeleton.points,
            max_context=self.plan.max_context,
            weight_bytes=self.weights.nbytes,
            blocks_plain=places.count(BlockPlace.PLAIN),
            blocks_packed=places.count(BlockPlace.PACKED),
            blocks_streamed=places.count(BlockPlace.STREAMED),
            streamed_bytes=places.streamed_bytes,
            ring_bytes=places.ring_bytes,
            scratch_bytes=places.scratch_bytes,
            notes=[*self.weights.notes, *places.notes],
            kv_bytes=self.pool_bytes,
            fingerprint=self.weights.identity,
            kv_heads=self.model.layout.kv_heads,
            head_dim=self.model.layout.head_dim,
            kv=self.model.layout,
            page_size=self.plan.page_size,
            page_bytes=self.plan.page_bytes,
            pages=kv.pool.capacity,
            pages_used=kv.pool.used,
        )


def _have_adapters(rows: Rows) -> bool:
    return any(row.session.adapter for row in rows)


def kv_label(name: str) -> str:
    return f"KV pages of {name}"


def workspace_label(name: str) -> str:
    return f"workspace of {name}"
