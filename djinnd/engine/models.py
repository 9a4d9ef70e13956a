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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch

from djinn_client.errors import DjinnError, InvalidRequest, OutOfMemory
from djinnd import messages
from djinnd.core.session import Session
from djinnd.device import Device
from djinnd.engine.budgeting import change_budget
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.kernels.compiler import Compiling, KernelCompiler
from djinnd.engine.load.loading import LoadQueue, LoadResult
from djinnd.engine.paging.tiers import Tiers
from djinnd.engine.report import Reporter
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.run.prepare_model import Preparation
from djinnd.engine.windows.deliveries import Deliveries
from djinnd.scheduler.scheduler import Scheduler

log = logging.getLogger("djinnd.engine")


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
    _channel: ServerChannel
    _limits: tuple[int, int]  # most tokens and rows of a step
    _compiler: KernelCompiler | None  # None: kernels are compiled at launch or not at all
    _preparing: dict[Preparation, Compiling] = field(init=False, default_factory=dict)  # models that wait for kernels
    # models under check; only the first is worked on
    _adopting: deque[tuple[Preparation, Iterator[None]]] = field(init=False, default_factory=deque)

    # --- coming -----------------------------------------------------------------------------------------------------

    def load(self, message: messages.Load) -> None:
        self.spare_idle()  # the model may need all memory
        self._loads.submit(message)

    def describe(self, message: messages.Plan | messages.DescribeDevice) -> None:
        """Plans a load, or describes the device for a plan, as if the model's own memory were free."""
        runner = self._runners.get(message.model)
        held = 0 if runner is None else runner.nbytes
        self._loads.submit(msgspec.structs.replace(message, held_bytes=held))

    def turn(self) -> None:
        """Advances all loads, and drops parked rows that no session needs."""
        while (result := self._loads.take()) is not None:
            load, refusal = result.load, _attempt(partial(self._prepare, result))
            del result
            self._refuse(load, refusal)
        while (preparation := self._compiled()) is not None:
            load, compiling = preparation.load, self._preparing.pop(preparation)
            refusal = _attempt(partial(self._finish_compiled, preparation, compiling))
            del preparation
            self._refuse(load, refusal)
        if self._adopting:
            self._adopt_some()
        for runner in self._runners.values():
            if runner.parked:
                runner.parked.sweep()

    def _refuse(self, load: messages.Load, refusal: DjinnError | None) -> None:
        """Ends the load's request, if there is a refusal. The caller keeps no reference to the refused model, only
        cycles do."""
        if refusal is not None:
            log.warning("model_refused model=%s error=%s", load.model, refusal.message)
            self._device.synchronize()  # raises if the device's error is permanent, which ends the engine
            gc.collect()  # frames of the failure are in cycles, which hold the refused model's memory
            self._channel.refuse(load.request, refusal)

    def _prepare(self, result: LoadResult) -> None:
        if result.error is not None:
            raise result.error
        assert result.weights is not None and result.shape is not None
        load = result.load
        with _naming(load.model):
            preparation = Preparation(load, result.weights, result.shape, self._device, *self._limits)
            missing = [] if self._compiler is None else preparation.missing_kernels()
        if self._compiler is not None and missing:
            told = partial(self._tell_compiling, load.model)
            self._preparing[preparation] = Compiling(self._compiler, missing, told, self._channel.wake)
        else:
            self._adopting.append((preparation, preparation.finish()))

    def _tell_compiling(self, model: str, done: int, total: int) -> None:
        self._channel.send(messages.Loading(model, "compiling", done, total))

    def _compiled(self) -> Preparation | None:
        """A model whose compilation has ended, successfully or not."""
        return next((p for p, compiling in self._preparing.items() if compiling.is_over), None)

    def _finish_compiled(self, preparation: Preparation, compiling: Compiling) -> None:
        preparation.kernels_compiled(compiling.variants, compiling.failed)
        self._adopting.append((preparation, preparation.finish()))

    @property
    def is_adopting(self) -> bool:
        return bool(self._adopting)

    def _adopt_some(self) -> None:
        """Does one part of the first model's check. Requests of other models wait for one part, never for the whole
        check."""
        preparation, parts = self._adopting.popleft()
        load, refusal = preparation.load, _attempt(partial(self._do_part, preparation, parts))
        del preparation, parts
        self._refuse(load, refusal)

    def _do_part(self, preparation: Preparation, parts: Iterator[None]) -> None:
        load = preparation.load
        with _naming(load.model):
            for _ in parts:
                self._channel.send(messages.Loading(load.model, "preparing"))
                self._adopting.appendleft((preparation, parts))
                return
        self._adopt(preparation.runner)

    def _adopt(self, runner: ModelRunner) -> None:
        load = runner.load
        self._release_host(runner)
        self._runners[load.model] = runner
        paging = self._tiers.add(runner)
        self._scheduler.add_model(load.model, runner.kv, runner.plan.max_context, runner.model.num_blocks, paging)
        self._channel.send(messages.Loaded(load.request, self._reporter.info(runner)))

    def close(self) -> None:
        """Stops all compilations."""
        for compiling in self._preparing.values():
            compiling.stop()

    def _release_host(self, runner: ModelRunner) -> None:
        """Releases the model's copy on the host, if the load asks for that and no block needs it."""
        if runner.load.placing.keep_host:
            return
        if runner.places.streamed:
            runner.weights.notes.append("the copy on the host stays: blocks stream from it")
            return
        runner.weights.release_host(self._device)
        self._channel.send(messages.HostReleased(runner.name))

    # --- while they are there ---------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Prepares one model for later steps. A request that comes meanwhile waits, so this runs only in a quiet
        moment, not between the calls of a client that makes one after another. → True if there was something to
        prepare."""
        return any(runner.prepare() for runner in self._runners.values())

    def spare_idle(self) -> None:
        """Frees the device memory of idle sessions, except pages. Edits are uploaded again at the next run, and a
        session that has stopped inside the model recomputes."""
        for session in self._scheduler.sessions():
            if session.request is None:
                self._runners[session.model].use_edits(session.id, ())
                self._drop_stage(session)

    def _drop_stage(self, session: Session) -> None:
        self._scheduler.drop_stage(session.id)
        self._runners[session.model].parked.drop(session.id)

    def set_budget(self, message: messages.SetBudget) -> None:
        began = time.monotonic()
        try:
            if self._loads.is_busy or self._preparing or self._adopting:
                raise InvalidRequest("a model is being loaded: wait for it before you change the budget")
            for session in self._scheduler.sessions():
                self._drop_stage(session)
            change_budget(
                self._device, self._runners.values(), self._scheduler, message.memory_bytes, self._tiers.settle
            )
        except DjinnError as error:
            self._channel.refuse(message.request, error)
            return
        budget, models = self._device.budget, [self._reporter.info(runner) for runner in self._runners.values()]
        log.info("budget_changed bytes=%d seconds=%.3f", budget.total, time.monotonic() - began)
        self._channel.send(
            messages.BudgetSet(message.request, budget.total, budget.used, time.monotonic() - began, models)
        )

    def mark_public(self, message: messages.PublicPrefix) -> None:
        kv = self._runners[message.model].kv
        kv.public.mark(message.tokens, kv.page_size)

    # --- going ------------------------------------------------------------------------------------------------------

    def unload(self, message: messages.Unload) -> None:
        def release() -> None:
            self._deliveries.abandon(self._runners[message.model])
            self._tiers.remove(message.model)
            self._scheduler.remove_model(message.model)
            self._runners.pop(message.model).release()
            gc.collect()  # modules are in cycles, which hold the model's shared memory and page files
            self._channel.send(messages.Unloaded(message.request))

        if message.keep_pages:
            self._tiers.retire(message.model, release)
        else:
            release()


def _attempt(step: Callable[[], None]) -> DjinnError | None:
    """Calls `step`. → the error, if it fails."""
    try:
        step()
    except DjinnError as error:
        return error.with_traceback(None)
    return None


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
