"""The engine's models: load, serve, unload; and the budget that they share.

Load ─► read beside the steps (loading.py) ─► prepared: workspace, KV pool ─► kernels compiled beside the steps ─┐
        ┌────────────────────────────────────────────────────────────────────────────────────────────────────────┘
        └─► adopted: check (a part between two steps), graphs, tiers ─► Loaded ··· Unload ─► Unloaded
            a failure gives all memory back ─► Failed
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch

from djinn_client.errors import DjinnError, InvalidRequest, OutOfMemory
from djinnd import messages
from djinnd.core.session import Session
from djinnd.device import Device
from djinnd.engine.budgeting import change_budget
from djinnd.engine.drafts.drafts import Drafts
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.kernels.compiler import Compiling, KernelCompiler
from djinnd.engine.load.loading import LoadQueue, LoadResult
from djinnd.engine.paging.tiers import Tiers
from djinnd.engine.report import Reporter
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.run.prepare_model import prepare_model
from djinnd.engine.windows.deliveries import Deliveries
from djinnd.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # only CUDA builds of torch bring Triton
    from djinnd.model.kernels.launching.variants import Variant

log = logging.getLogger("djinnd.engine")


@dataclass(slots=True, eq=False)
class _PendingModel:
    """A loaded model that does not serve yet."""

    load: messages.Load
    parts: Iterator[Compiling | None]  # of EngineModels._serve
    compiling: Compiling | None = None  # the compilation that the next part waits for


@dataclass(eq=False)
class EngineModels:
    """Used by the engine's thread, and the only writer of `runners`."""

    _device: Device
    _scheduler: Scheduler
    _loads: LoadQueue
    _tiers: Tiers
    _deliveries: Deliveries
    _reporter: Reporter
    _runners: dict[str, ModelRunner]  # by model
    _drafts: Drafts
    _channel: ServerChannel
    _limits: tuple[int, int]  # most tokens and rows of a step
    _compiler: KernelCompiler | None  # None: kernels are compiled at launch or not at all
    _pending: list[_PendingModel] = field(init=False, default_factory=list)  # in the order in which they were loaded

    # --- models are loaded --------------------------------------------------------------------------------------------

    def load(self, message: messages.Load) -> None:
        self.spare_idle()  # the model may need all memory
        self._loads.submit(message)

    def describe(self, message: messages.Plan | messages.DescribeDevice) -> None:
        """Plans a load, or describes the device for a plan, as if the model's own memory were free."""
        runner = self._runners.get(message.model)
        held = 0 if runner is None else runner.nbytes
        self._loads.submit(msgspec.structs.replace(message, held_bytes=held))

    def turn(self) -> None:
        """Advances the loads, and drops parked rows that no session needs."""
        ready = self._next_ready()
        while (result := self._loads.take()) is not None:
            pending, ready = _PendingModel(result.load, self._serve(result)), None
            del result
            self._pending.append(pending)
            self._advance(pending)
        if ready is not None:
            self._advance(ready)
        for runner in self._runners.values():
            if runner.probes.parked:
                runner.probes.parked.sweep()

    def _next_ready(self) -> _PendingModel | None:
        """The first load that does not wait for kernels. Only this one is worked on, so requests of other models wait
        for one part of a check, never for more."""
        return next((each for each in self._pending if each.compiling is None or each.compiling.is_over), None)

    @property
    def is_adopting(self) -> bool:
        return self._next_ready() is not None

    def _serve(self, result: LoadResult) -> Iterator[Compiling | None]:
        """Prepares a loaded model for serving, and adopts it: see `prepare_model`."""
        load = result.load
        with _naming(load.model):
            if result.error is not None:
                raise result.error
            assert result.weights is not None and result.shape is not None
            try:
                self._drafts.check(load, result.weights.skeleton)
            except DjinnError:
                result.weights.release(self._device)
                raise
            compile = None if self._compiler is None else partial(self._compile, self._compiler, load.model)
            runner = yield from prepare_model(load, result.weights, result.shape, self._device, *self._limits, compile)
        self._adopt(runner)

    def _compile(self, compiler: KernelCompiler, model: str, missing: list[Variant]) -> Compiling:
        def told(done: int, total: int) -> None:
            self._channel.send(messages.Loading(model, "compiling", done, total))

        return Compiling(compiler, missing, told, self._channel.wake)

    def _advance(self, pending: _PendingModel) -> None:
        """Does the load's next part. A failure ends the load's request."""
        try:
            pending.compiling = next(pending.parts)
            if pending.compiling is None:
                self._channel.send(messages.Loading(pending.load.model, "preparing"))
            return
        except StopIteration:
            refusal = None
        except DjinnError as error:
            refusal = error.with_traceback(None)
        self._pending.remove(pending)
        if refusal is not None:
            log.warning("model_refused model=%s error=%s", pending.load.model, refusal.message)
            self._device.synchronize()  # raises if the device's error is permanent, which ends the engine
            gc.collect()  # frames of the failure are in cycles, which hold the refused model's memory
            self._channel.refuse(pending.load.request, refusal)

    def _adopt(self, runner: ModelRunner) -> None:
        load = runner.load
        self._release_host(runner)
        self._runners[load.model] = runner
        paging = self._tiers.add(runner)
        self._scheduler.add_model(load.model, runner.kv, runner.plan.max_context, runner.model.num_blocks, paging)
        self._drafts.attach(runner)
        self._channel.send(messages.Loaded(load.request, self._reporter.info(runner)))

    def close(self) -> None:
        """Stops all compilations."""
        for pending in self._pending:
            if pending.compiling is not None:
                pending.compiling.stop()

    def _release_host(self, runner: ModelRunner) -> None:
        """Releases the model's copy on the host, if the load asks for that and no block needs it."""
        if runner.load.placing.keep_host:
            return
        if runner.places.streamed:
            runner.weights.notes.append("the copy on the host stays: blocks stream from it")
            return
        runner.weights.release_host(self._device)
        self._channel.send(messages.HostReleased(runner.name))

    # --- models serve -------------------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Prepares one model for later steps. A request that comes meanwhile waits, so this runs only in a quiet
        moment, not between the calls of a client that makes one after another. → True if there was something to
        prepare."""
        return any(runner.graphs.capture_next() for runner in self._runners.values())

    def spare_idle(self) -> None:
        """Frees the device memory of idle sessions, except pages. Edits are uploaded again at the next run, and a
        session that has stopped inside the model recomputes."""
        for session in self._scheduler.sessions():
            if session.request is None:
                self._runners[session.model].probes.use_edits(session.id, ())
                self._drop_stage(session)

    def _drop_stage(self, session: Session) -> None:
        self._scheduler.drop_stage(session.id)
        self._runners[session.model].probes.parked.drop(session.id)

    def set_budget(self, message: messages.SetBudget) -> None:
        """Raises InvalidRequest during a load, or the errors of change_budget."""
        began = time.monotonic()
        if self._loads.is_busy or self._pending:
            raise InvalidRequest("a model is being loaded: wait for it before you change the budget")
        for session in self._scheduler.sessions():
            self._drop_stage(session)
        change_budget(self._device, self._runners.values(), self._scheduler, message.memory_bytes, self._tiers.settle)
        budget, models = self._device.budget, [self._reporter.info(runner) for runner in self._runners.values()]
        log.info("budget_changed bytes=%d seconds=%.3f", budget.total, time.monotonic() - began)
        self._channel.send(
            messages.BudgetSet(message.request, budget.total, budget.used, time.monotonic() - began, models)
        )

    def mark_public(self, message: messages.PublicPrefix) -> None:
        kv = self._runners[message.model].kv
        kv.public.mark(message.tokens, kv.page_size)

    # --- models are unloaded ------------------------------------------------------------------------------------------

    def unload(self, message: messages.Unload) -> None:
        def release() -> None:
            self._deliveries.abandon(self._runners[message.model])
            self._tiers.remove(message.model)
            self._scheduler.remove_model(message.model)
            self._runners.pop(message.model).release()
            gc.collect()  # modules are in cycles, which hold the model's shared memory and page files
            self._channel.send(messages.Unloaded(message.request))

        self._drafts.detach(message.model)
        if message.keep_pages:
            self._tiers.retire(message.model, release)
        else:
            release()


@contextmanager
def _naming(model: str) -> Iterator[None]:
    """Turns every exception into a DjinnError that names the model."""
    try:
        yield
    except DjinnError:
        raise
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"preparing {model}: {error}") from error
    except Exception as error:
        log.exception("preparing_failed model=%s", model)
        raise DjinnError(f"preparing {model} failed: {error!r}") from error
