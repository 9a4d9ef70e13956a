"""Runs a batch on one model: rows in, sampled tokens out. Each part of the runner has its own state:

    pages     the pool and its block tables                           PageMemory
    graphs    the captured shapes, or none                            ModelGraphs
    probes    edits, captures, and sessions that wait inside a model  ModelProbes
    adapters  LoRA adapters on the device                             AdapterResidency
    passes    the inputs of the last pass, and its shape              Passes

The runner has the rest: sampler, scores and windows of logits. A step that has been launched is a value: Launched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from djinnd.core.batch import Batch
from djinnd.core.request import Request
from djinnd.device import Device
from djinnd.device.cuda import CudaDevice
from djinnd.engine.adapters.residency import AdapterResidency
from djinnd.engine.memory.memory import KvPlan, ModelShape, workspace_bytes, workspace_label
from djinnd.engine.probes.model_probes import ModelProbes
from djinnd.engine.run.batch_inputs import Rows
from djinnd.engine.run.guessed_rows import ALL
from djinnd.engine.run.hidden_states import HiddenStates
from djinnd.engine.run.launched import Launched, queue_samples
from djinnd.engine.run.logits_window import LogitsWindow
from djinnd.engine.run.model_graphs import ModelGraphs
from djinnd.engine.run.page_memory import PageMemory
from djinnd.engine.run.passes import Passes
from djinnd.engine.run.prompt_scores import PromptScorer
from djinnd.engine.run.step_threads import StepThreads
from djinnd.engine.tuning import LAUNCHES_AHEAD
from djinnd.messages import Load
from djinnd.model.placing.loader import Weights
from djinnd.model.sampling.sampler import Sampled, Sampler
from djinnd.model.sampling.token_masks import RowMasks
from djinnd.model.step.last_tokens import LastTokens
from djinnd.model.step.paged_model import PagedModel
from djinnd.model.tuning import TILE_TOKENS
from djinnd.weights.plan import PlacementPlan

FindMasks = Callable[[Rows, Callable[[], bool]], RowMasks | None]


@dataclass(eq=False)
class ModelRunner:
    """Owns one served model on the device: its weights, pages, graphs, probes, adapters and sampler. Launches its
    steps, and reads them."""

    load: Load
    weights: Weights
    model: PagedModel
    shape: ModelShape
    pages: PageMemory
    device: Device
    max_tokens: int  # of a step
    max_rows: int
    hidden: HiddenStates | None = None  # None: the model is no head

    def __post_init__(self) -> None:
        model, device, plan, placing = self.model, self.device, self.pages.plan, self.load.placing
        self.name = self.weights.name
        self.kv = self.pages.kv
        with device.computing():
            self.sampler = Sampler(model.vocab, device.torch_device)
        self.windows: dict[int, LogitsWindow] = {}  # by request: the logits of forward passes that run
        self.scores = PromptScorer()
        self.probes = ModelProbes(device, self.name, model.skeleton.points, model.dtype)
        self.adapters = AdapterResidency(device, self.name, model, placing.adapter_bytes)
        self._threads = StepThreads()
        kind = device.torch_device.type
        self.last_tokens = LastTokens(self.max_rows, device.torch_device) if LAUNCHES_AHEAD[kind] else None
        self.passes = Passes(
            model,
            device,
            self.kv,
            self.probes,
            self.adapters,
            self.windows,
            self.scores,
            plan.page_size,
            TILE_TOKENS if kind == "cuda" else self.max_tokens,
            self.last_tokens,
        )
        limits = self.max_tokens, self.max_rows, self.kv.pages_for(plan.max_context), plan.max_context
        self.graphs = ModelGraphs(self.name, model, device, limits, self.last_tokens)

    @property
    def plan(self) -> KvPlan:
        return self.pages.plan

    @property
    def places(self) -> PlacementPlan:
        plan = self.weights.placement.plan
        assert plan is not None
        return plan

    @property
    def speculates(self) -> bool:
        """True if steps may run guesses. The states of a hybrid model cannot be taken back. On a GPU, a step with
        guesses needs a graph, unless weights stream: models with latent attention have no graphs for it."""
        if not self.load.placing.speculation or self.model.has_states:
            return False
        on_gpu = isinstance(self.device, CudaDevice)
        return not on_gpu or self.model.placement.streams or not (self.graphs.are_given_up or self.model.latents)

    @property
    def nbytes(self) -> int:
        """Bytes of the device's budget that the model takes."""
        beside = self.probes.nbytes + self.adapters.nbytes + (0 if self.hidden is None else self.hidden.nbytes)
        return self.weights.nbytes + self.pages.nbytes + workspace_bytes(self.shape, self.max_tokens) + beside

    def move(self, places: PlacementPlan, num_pages: int) -> None:
        """Between two steps: moves blocks to their places, and pages in use into a pool of `num_pages`, which counts
        the scratch page. Parts that shrink go first, to make room."""
        placement = self.weights.placement
        self.graphs.drop()
        self.device.synchronize()
        placement.make_room(places)
        if num_pages != self.plan.num_pages:
            self.pages.resize(num_pages)
        placement.move(places)
        self.graphs.renew()

    def recover(self) -> None:
        """Resets the model after a step that failed."""
        self.scores.clear()
        self.model.placement.restart()

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
        self.passes.ran = None
        threads = nullcontext() if isinstance(self.device, CudaDevice) else self._threads.of(batch)
        with self.device.computing(late=True), threads:
            if after is not None:
                after.hand_over(self.last_tokens)
            self.pages.zero_stale()
            rows, logits = self.passes.run(batch.rows, self.probes.touched(batch), self.graphs.current)
            self.device.catch_up()  # all rows may have ended before the block where a full pass catches up
            if logits is None:
                return Launched(batch, (), False, None, self.passes.ran)
            sampling = [row for row in rows if row.samples]
            masked = None
            if masks is not None:
                with self.device.span("compute", "masks"):  # for as long as the device has to wait for them
                    masked = masks(sampling, meanwhile)
            queued = queue_samples(self.sampler, logits, sampling, masked)
            guessed = ALL if masked is None else masked.guessed
            return Launched(batch, sampling, rows is not batch.rows, queued, self.passes.ran, guessed)

    def finish(self, launched: Launched, meanwhile: Callable[[], bool] = lambda: False) -> Sampled:
        """Waits for a launched step. → its tokens, one for each row that samples, in the order of the batch. A row with
        a right guess has further tokens. Steps finish in the order in which they were launched.

        `meanwhile`: called while the device works, and again as long as it returns True.
        """
        if launched.queued is None:
            return Sampled([], [], [])
        with self.device.computing(late=True):
            sampled = self.sampler.read(launched.queued, meanwhile)
        return launched.of_batch(sampled)

    def can_follow(self, launched: Launched) -> bool:
        """True if the step after this one may be launched before this one's tokens are read.

        The next step must be a decode step of the same kind, by a graph that exists. Some features need the tokens, or
        read results on the host: penalties, log probabilities, captures and edits. A streamed model waits for the bus
        and gains nothing.
        """
        if self.last_tokens is None or self.model.has_states or self.model.placement.streams:
            return False
        return not self.probes and self.graphs.serve(launched.shape) and not launched.reads_tokens

    def settle(self) -> None:
        """After a step, when its results have been sent: captures a graph for the shape of the last step that was
        launched, if that pays."""
        self.graphs.capture(self.passes.ran)

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
        self.graphs.drop()
        self.probes.release()
        self.adapters.release()
        self.weights.release(self.device)
        self.pages.release()
        self.device.release(workspace_label(self.name))
        if self.hidden is not None:
            self.use_hidden_states(None)
            self.hidden.release()

    def use_hidden_states(self, hidden: HiddenStates | None) -> None:
        """The model is a head, and reads the hidden states before its tokens there from now on. None: they are 0."""
        head = self.model.skeleton.head_input
        assert head is not None
        head.previous = None if hidden is None else hidden.previous
