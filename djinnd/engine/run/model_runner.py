"""Runs a batch on one model: rows in, sampled tokens out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from djinn_client.protocol import ModelInfo
from djinnd.core.batch import Batch
from djinnd.core.edits import Edit
from djinnd.core.request import Request
from djinnd.device import Device
from djinnd.device.cuda import CudaDevice
from djinnd.engine.adapters.residency import AdapterResidency
from djinnd.engine.memory.memory import KvPlan, ModelShape, workspace_bytes
from djinnd.engine.probes.captures import Captures
from djinnd.engine.probes.edit_table import EditTable
from djinnd.engine.probes.parked_states import ParkedStates
from djinnd.engine.probes.step_probe import Touched
from djinnd.engine.run.batch_inputs import Rows, in_order
from djinnd.engine.run.guessed_rows import ALL, of_rows, samples_of
from djinnd.engine.run.hidden_states import HiddenStates
from djinnd.engine.run.logits_window import LogitsWindow
from djinnd.engine.run.passes import Behind, BlockTables, Passes
from djinnd.engine.run.prompt_scores import PromptScorer
from djinnd.engine.run.step_threads import StepThreads
from djinnd.engine.tuning import LAUNCHES_AHEAD, RESIZED_AT_ONCE
from djinnd.kvcache.manager import KvManager
from djinnd.messages import Load
from djinnd.model.placing.loader import Weights
from djinnd.model.sampling.draw import is_penalised
from djinnd.model.sampling.sampler import Queued, Sampled, Sampler
from djinnd.model.sampling.token_masks import RowMasks
from djinnd.model.step.graphs import Shape, StepGraphs
from djinnd.model.step.last_tokens import LastTokens
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import TILE_TOKENS
from djinnd.weights.plan import BlockPlace, PlacementPlan

log = logging.getLogger("djinnd.engine")

FindMasks = Callable[[Rows, Callable[[], bool]], RowMasks | None]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device has got, and that the host has not read."""

    batch: Batch
    sampling: Rows  # rows that sample, in the order of the passes
    is_reordered: bool  # that is not the order of the batch
    queued: Queued | None  # None: no row samples
    shape: Shape | None  # of its pass, if a graph serves all its rows and blocks
    masked: Mapping[int, int] = field(default_factory=dict)  # see RowMasks.guessed

    def hand_over(self, last_tokens: LastTokens | None) -> None:
        """Keeps its tokens on the device for the step that follows, which will overwrite its logits."""
        assert self.queued is not None and last_tokens is not None
        last_tokens.keep(self.queued.asked.values)
        self.queued.logits = None


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
    hidden: HiddenStates | None = None  # None: the model is no head

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
        self._threads = StepThreads()
        kind = device.torch_device.type
        self.last_tokens = LastTokens(self.max_rows, device.torch_device) if LAUNCHES_AHEAD[kind] else None
        self._passes = Passes(
            model,
            device,
            self.kv,
            self.captures,
            self.parked,
            self.adapters,
            self.windows,
            self.scores,
            plan.page_size,
            TILE_TOKENS if kind == "cuda" else self.max_tokens,
            self.last_tokens,
        )
        self.graphs = self._new_graphs()

    def _new_graphs(self) -> StepGraphs | None:
        if self._is_eager or not isinstance(self.device, CudaDevice):
            return None
        context = self.plan.max_context
        limits = self.max_tokens, self.max_rows, self.kv.pages_for(context), context
        return StepGraphs(self.model, self.device, *limits, self.last_tokens)

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
        touched += self.adapters.nbytes + (0 if self.hidden is None else self.hidden.nbytes)
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

    def run(
        self, batch: Batch, meanwhile: Callable[[], bool] = lambda: False, masks: FindMasks | None = None
    ) -> Sampled:
        """`launch`, and then `finish`."""
        return self.finish(self.launch(batch, meanwhile, masks), meanwhile)

    @torch.inference_mode()
    def launch(
        self,
        batch: Batch,
        meanwhile: Callable[[], bool] = lambda: False,
        masks: FindMasks | None = None,
        after: Launched | None = None,
    ) -> Launched:
        """Queues one step on the device: samples a token for every row that samples, and writes the logits of forward
        passes to their windows. Only masks and the device's last inputs are waited for.

        `masks`: finds the grammar masks of rows that sample, and calls `meanwhile` while it waits for them; None: no
        request has a grammar. `after`: the step that `batch` follows. It has been launched and not finished.
        """
        self._passes.ran = None
        threads = nullcontext() if isinstance(self.device, CudaDevice) else self._threads.of(batch)
        with self.device.computing(late=True), threads:
            if after is not None:
                after.hand_over(self.last_tokens)
            self.zero_stale()
            touched = self._touch(batch) if self.edits or self._captures_in(batch) else None
            rows, logits = self._passes.run(batch.rows, touched, self.graphs)
            self.device.catch_up()  # all rows may have ended before the block where a full pass catches up
            if logits is None:
                return Launched(batch, (), False, None, self._passes.ran)
            sampling = [row for row in rows if row.samples]
            masked = None
            if masks is not None:
                with self.device.span("compute", "masks"):  # for as long as the device has to wait for them
                    masked = masks(sampling, meanwhile)
            queued = self._queue(logits, sampling, masked)
            guessed = ALL if masked is None else masked.guessed
            return Launched(batch, sampling, rows is not batch.rows, queued, self._passes.ran, guessed)

    def passes_over(self, tables: BlockTables, last_tokens: LastTokens) -> Passes:
        """Further passes of the model, over other block tables and without edits and captures. No step may run
        meanwhile: both may use the inputs of the same graphs."""
        name, points, device = self.name, self.model.skeleton.points, self.device
        captures = Captures(device, name, points.width, points.vocab, self.model.dtype)
        parked = ParkedStates(device, name, points.width, self.model.dtype)
        return replace(
            self._passes,
            kv=tables,
            captures=captures,
            parked=parked,
            windows={},
            scores=PromptScorer(),
            last_tokens=last_tokens,
            behind=None,
        )

    def watch(self, behind: Behind | None) -> None:
        """`behind` gets the hidden states of every step, see Passes; None: they are not wanted any more."""
        self._passes.behind = behind

    def wait(self) -> None:
        """Waits until the device has taken the inputs of the last step."""
        self._passes.wait()

    def zero_stale(self) -> None:
        """Clears pages that have changed hands, before a step uses them."""
        stale = self.kv.pool.take_stale()
        if stale:
            self.device.catch_up()  # a copy into a page that has changed hands must not land after the zeros
            self.model.zero_pages(stale)

    def _queue(self, logits: Tensor, sampling: Rows, masks: RowMasks | None) -> Queued:
        """Queues the sampling of these rows. A row with a guess has a sample for each of its tokens."""
        if any(row.guess for row in sampling):
            sessions, ahead = samples_of(sampling)
            return self.sampler.queue(logits, sessions, masks, ahead)
        follows = sampling[0].fed is not None  # and so does every row
        return self.sampler.queue(
            logits, [row.session for row in sampling], masks, [1] * len(sampling) if follows else None
        )

    def finish(self, launched: Launched, meanwhile: Callable[[], bool] = lambda: False) -> Sampled:
        """Waits for a launched step. → its tokens, one for each row that samples, in the order of the batch. A row with
        a right guess has further tokens. Steps finish in the order in which they were launched.

        `meanwhile`: called while the device works, and again as long as it returns True.
        """
        if launched.queued is None:
            return Sampled([], [], [])
        with self.device.computing(late=True):
            sampled = self.sampler.read(launched.queued, meanwhile)
        sampling = launched.sampling
        if any(row.guess for row in sampling):
            sampled = of_rows(sampled, sampling, launched.masked)
        return in_order(sampled, sampling, launched.batch.rows) if launched.is_reordered else sampled

    def can_follow(self, launched: Launched) -> bool:
        """True if the step after this one may be launched before this one's tokens are read.

        The next step must be a decode step of the same kind, by a graph that exists. Some features need the tokens, or
        read results on the host: penalties, log probabilities, captures and edits. A streamed model waits for the bus
        and gains nothing.
        """
        if self.last_tokens is None or self.model.has_states or self.model.placement.streams:
            return False
        if self.edits or self.captures or self.parked:
            return False
        graphs, shape = self.graphs, launched.shape
        if graphs is None:
            has_graph = not isinstance(self.device, CudaDevice)
        else:
            has_graph = shape is not None and not graphs.wants(shape)
        return has_graph and not any(_reads_tokens(row.request) for row in launched.batch.rows)

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

    def settle(self) -> None:
        """After a step, when its results have been sent: captures a graph for the shape of the last step that was
        launched, if that pays."""
        self.capture(self._passes.ran)

    def capture(self, shape: Shape | None) -> None:
        """Captures a graph for the shape of the last pass, if that pays. None: no graph can replay that pass."""
        graphs = self.graphs
        if graphs is not None and shape is not None and graphs.wants(shape):
            self._attempt(graphs, lambda: graphs.capture(shape))

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
        if self.hidden is not None:
            self.use_hidden_states(None)
            self.hidden.release()

    def use_hidden_states(self, hidden: HiddenStates | None) -> None:
        """The model is a head, and reads the hidden states before its tokens there from now on. None: they are 0."""
        head = self.model.skeleton.head_input
        assert head is not None
        head.previous = None if hidden is None else hidden.previous

    @property
    def places(self) -> PlacementPlan:
        plan = self.weights.placement.plan
        assert plan is not None
        return plan

    def info(self) -> ModelInfo:
        kv, places, beside = self.kv, self.places, self.model.placement.beside
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
            streamed_bytes=places.streamed_bytes - (0 if beside is None else beside.saved_bytes),
            ring_bytes=places.ring_bytes,
            scratch_bytes=places.scratch_bytes,
            notes=[*self.weights.notes, *places.notes, *([] if beside is None else beside.notes)],
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


def _reads_tokens(request: Request) -> bool:
    """True if sampling for the request needs the tokens before, or reads more than tokens."""
    return is_penalised(request.sampling) or request.logprobs is not None


def kv_label(name: str) -> str:
    return f"KV pages of {name}"


def workspace_label(name: str) -> str:
    return f"workspace of {name}"
