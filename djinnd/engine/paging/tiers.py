"""The host and disk tiers of the engine's models: set up when a model is served, advanced in each turn of the loop, and
reported."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from djinn_client.errors import SessionNotFound
from djinn_client.protocol import ModelInfo
from djinnd import messages
from djinnd.core.batch import Batch
from djinnd.core.session import Session
from djinnd.device import Device
from djinnd.engine.load.loading import LoadQueue, PagesResult, WantFile, WantPages
from djinnd.engine.memory.host_pages import page_file_name, pages_fingerprint
from djinnd.engine.memory.host_room import host_room
from djinnd.engine.memory.memory import tier_pages
from djinnd.engine.paging.pauses import NO_PAGES, Pauses
from djinnd.engine.paging.transfers import Transfers
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.tuning import SPARED_S, TEND_EVERY
from djinnd.kvcache.page_file import allocated_bytes
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tenancy import ANYBODY, Tenancy
from djinnd.kvcache.tier import limit_tenant, whole_pages
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.waits import Waits, back_at, is_worth_leaving

log = logging.getLogger("djinnd.engine")


@dataclass(slots=True)
class _Model:
    runner: ModelRunner
    paging: Paging
    transfers: Transfers


class Tiers:
    """Owns the Paging and the Transfers of each model. Used by the engine's thread."""

    def __init__(self, device: Device, scheduler: Scheduler, loads: LoadQueue, pauses: Pauses) -> None:
        self._device = device
        self._scheduler = scheduler
        self._loads = loads
        self._pauses = pauses
        self._models: dict[str, _Model] = {}
        self._on_host, self._on_disk = Tenancy(), Tenancy()
        # by model: called when its pages are on the host, see `retire`
        self._retiring: dict[str, Callable[[], None]] = {}
        self._batch: Batch | None = None  # of the current step, or the last one
        self._tended_at = 0.0
        self._spared_at = -math.inf  # time of the last step with a row that `Policy.protects`
        self._waits = Waits()

    # --- models -----------------------------------------------------------------------------------------------------

    def add(self, runner: ModelRunner) -> Paging:
        """Makes the model's Paging, for the scheduler's `add_model`, and submits the job that sets up its tiers."""
        load, plan = runner.load, runner.plan
        fingerprint = pages_fingerprint(runner.weights.fingerprint, runner.model.dtype, runner.shape, plan.page_size)
        name = page_file_name(load.model, fingerprint)
        room = host_room(load.disk_folder, self._device.untouched_host_bytes)
        room = replace(room, disk=room.disk + allocated_bytes(load.disk_folder, name) if load.disk_folder else 0)
        sizes = plan.page_bytes, runner.pages.nbytes, runner.weights.store.nbytes
        pages = tier_pages(*sizes, load.host_kv_bytes, load.disk_kv_bytes, room)
        paging = Paging(runner.kv)
        transfers = Transfers(self._device, paging, runner.pages.bytes_now, runner.pages.half_bytes)
        self._models[runner.name] = _Model(runner, paging, transfers)
        file = None
        if pages.disk:  # the number of slots that was asked for, if there is room for them
            asked = load.disk_kv_bytes
            any_size = asked is None or pages.disk < asked // whole_pages(plan.page_bytes)
            file = WantFile(load.disk_folder, name, pages.disk, any_size)
        if pages.host:
            paging.is_coming = True
            # an earlier engine filled the host's copy of the weights, so it has probably left pages too
            paging.is_expected = runner.weights.is_adopted
            self._loads.submit(WantPages(load.request, load.model, pages.host, plan.page_bytes, fingerprint, file))
        return paging

    def remove(self, name: str) -> None:
        """Called before the runner's release, when no session of the model is left."""
        self.settle(name)
        self._models.pop(name).transfers.close()

    def retire(self, name: str, then: Callable[[], None]) -> None:
        """Closes all sessions of the model, which are idle, and moves their pages to the host while other models step.
        `then` is called between two steps, when no copy of the model is in flight."""
        residency = self._scheduler.queues[name].residency
        for session in [session for session in self._scheduler.sessions() if session.model == name]:
            self._scheduler.drop_stage(session.id)
            transfer = residency.leave(session, sealed=True)
            if transfer is not None:  # a load may be waiting for it
                residency.paging.moves.hurry(transfer)
            ended = self._scheduler.close(session.id)  # the copies go on, because their pages are protected
            assert ended is None, f"{name} retires while request {ended.id} runs"
        self._retiring[name] = then

    def settle(self, name: str) -> None:
        """Blocks until all of the model's page copies, and copies that follow from them, are done."""
        model = self._models[name]
        while model.paging.is_busy:
            self._scheduler.queues[name].over(model.transfers.settle())

    def _adopt_pages(self, result: PagesResult) -> None:
        model = self._models.get(result.model)
        if model is None or model.runner.load.request != result.request:  # unloaded, or loaded again
            result.release()
            return
        model.paging.is_coming = model.paging.is_expected = False
        if result.pages is None:
            model.runner.weights.notes.append(f"{NO_PAGES} the host: {result.why}")
        else:
            model.transfers.attach_host(result.pages, self._on_host)
            self._scheduler.queues[result.model].residency.lower_tiers.costs.bus = self._device.rates().bus
            if result.file is not None:
                model.transfers.attach_disk(result.file, self._on_disk)
            elif result.why_no_file:
                model.runner.weights.notes.append(f"{NO_PAGES} disk, in {result.why_no_file}")

    # --- a turn of the engine's loop --------------------------------------------------------------------------------

    def turn(self, *, step_follows: bool = False) -> bool:
        """Advances all transfers. With `step_follows`, work that no call waits for is left for the step that follows,
        because the device idles now. → True if a transfer is under way."""
        while (result := self._loads.take_pages()) is not None:
            self._adopt_pages(result)
        self._tend(expected_only=step_follows)
        can_wait = step_follows and self._scheduler.nobody_waits
        for name, model in self._models.items():
            model.transfers.note_ready()
            if model.paging.is_busy:
                model.transfers.weights_stream = model.runner.model.placement.streams
                if can_wait:
                    model.transfers.note_asked()
                else:
                    self._scheduler.queues[name].over(model.transfers.turn())
                self._scheduler.queues[name].residency.lower_tiers.costs.disk = model.transfers.disk_rate
        if not can_wait:
            self._pauses.turn()
        for name in [name for name in self._retiring if not self._models[name].paging.is_busy]:
            self._retiring.pop(name)()
        return self.is_busy

    def _tend(self, *, expected_only: bool = False) -> None:
        now = time.monotonic()
        is_due = now - self._tended_at >= TEND_EVERY and not expected_only
        if is_due or now >= self._scheduler.next_wake:
            self._tended_at = now
            self._scheduler.tend(now)

    def note_step(self, batch: Batch) -> None:
        """The step of this batch is about to be launched."""
        self._batch = batch

    def work_during_step(self) -> bool:
        """Work on pages that overlaps with a step of the device: begins the copies that were asked for before, does the
        bookkeeping of copies that have ended, and evicts.

        Between two steps the device would idle meanwhile: half a millisecond for a wake-up's bookkeeping, up to three
        for an eviction. It is safe during a step: no session in it has pages that move or gives up pages for others,
        and the copies that follow from this begin in a later turn, after the step. → True if there is more to do, or
        may be.
        """
        if self.is_busy:
            assert self._batch is not None
            rate = self._rate_during_step(self._batch)
            for name, model in self._models.items():
                model.transfers.begin_copies(rate)
                if over := model.transfers.end():
                    self._scheduler.queues[name].over(over)
        self._pauses.turn()
        self._tend()
        return self._scheduler.depart() or self.is_busy

    def _rate_during_step(self, batch: Batch) -> float:
        """Bytes a second for page copies beside this step: see Transfers.begin_copies."""
        share, now = self._scheduler.policy.paging, time.monotonic()
        if any(map(self._scheduler.policy.protects, batch.rows)):
            self._spared_at = now
        if share == 1.0 or now - self._spared_at > SPARED_S:
            return math.inf
        return share * self._device.rates().bus

    def after_step(self, *, has_overlapped: bool) -> bool:
        """Begins the copies that were asked for. Unless `work_during_step` has run in this turn, also evicts a session.
        → True if more sessions are due to leave."""
        for model in self._models.values():
            model.transfers.begin_copies()
        return not has_overlapped and self._scheduler.depart()

    @property
    def is_busy(self) -> bool:
        """True if a transfer is under way, or about to begin."""
        return any(model.paging.is_busy for model in self._models.values())

    def follow(self) -> bool:
        """Called when the device is idle: sessions that wait for the last copies of a transfer may go on, ordered after
        the copies. → True if any does."""
        over = {name: model.transfers.follow() for name, model in self._models.items() if model.paging.is_busy}
        for name, transfers in over.items():
            self._scheduler.queues[name].over(transfers)
        return any(over.values())

    def wait(self) -> None:
        """Blocks until a copy ends or a short time has passed. Called when there is nothing else to do."""
        busy = next((model for model in self._models.values() if model.paging.is_busy), None)
        if busy is not None:
            busy.transfers.wait()

    @property
    def patience(self) -> float:
        """Seconds until the next session is expected back."""
        return max(0.0, self._scheduler.next_wake - time.monotonic())

    def note_prefill(self, model: str, tokens: int, seconds: float) -> None:
        """Updates the measured speed of prefill, which decides whether pages are worth copying."""
        costs, seen = self._scheduler.queues[model].residency.lower_tiers.costs, tokens / seconds
        costs.prefill = seen if not costs.prefill else 0.8 * costs.prefill + 0.2 * seen

    def keep(self) -> None:
        """Before the engine exits: moves every session's pages to the host, as far as it has room, for the next
        engine."""
        began = time.monotonic()
        for session in list(self._scheduler.sessions()):
            self._scheduler.drop_stage(session.id)  # the next engine does not have the rows that wait inside the model
            self._scheduler.queues[session.model].residency.leave(session, sealed=True)
        for name in self._models:
            self.settle(name)
        log.info("pages_kept seconds=%.3f", time.monotonic() - began)

    # --- signals of clients -------------------------------------------------------------------------------------------

    def signal(self, message: messages.Signal) -> None:
        try:
            session = self._scheduler.session(message.session)
        except SessionNotFound:  # closed meanwhile
            return
        if message.waits:
            self._begin_wait(session, message)
        else:
            self.called(session.id)
            self._scheduler.wake(session.id)

    def called(self, session_id: str) -> None:
        """A call on the session begins or is about to: its wait is over."""
        for other, since, expected in self._waits.end(session_id, time.monotonic()):
            self._scheduler.expect(other, since + expected)

    def _begin_wait(self, session: Session, message: messages.Signal) -> None:
        now = time.monotonic()
        self._waits.begin(session.id, session.tenant, message.tool, now)
        expected = message.expected_s or self._waits.expected(session.tenant, message.tool)
        copying, is_here = self._seconds_to_copy(session), self._pages_held(session) > 0
        if session.waits or not is_here or is_worth_leaving(expected, copying):
            self._scheduler.wait(session.id, back_at(now, expected, copying))

    def _pages_held(self, session: Session) -> int:
        return self._scheduler.queues[session.model].residency.kv.pages_held(session.id)

    def _seconds_to_copy(self, session: Session) -> float:
        """For the session's pages between host and device: pages that it holds, or that it held when it left."""
        residency = self._scheduler.queues[session.model].residency
        kv, bus = residency.kv, residency.lower_tiers.costs.bus
        pages = self._pages_held(session) or kv.pages_for(min(session.left_at, len(session.tokens)))
        return pages * kv.page_bytes / bus if bus else 0.0

    # --- tenants ----------------------------------------------------------------------------------------------------

    def set_tenants(self, tenants: Sequence[messages.TenantLimits]) -> None:
        """Sets the limits for host and disk, over all models. The scheduler has the limits of the device."""
        for limits in tenants:
            limit_tenant(self._on_host, limits.tenant, limits.host_kv)
            limit_tenant(self._on_disk, limits.tenant, limits.disk_kv)

    def uses_of_tenants(self) -> list[messages.TenantUse]:
        """For each tenant that has a page in some tier, by rising number. Public pages belong to no tenant."""
        device: Counter[int] = Counter()
        for model in self._models.values():
            kv = model.runner.kv
            device.update({tenant: pages * kv.page_bytes for tenant, pages in kv.pool.uses().items()})
        host, disk = self._on_host.uses(), self._on_disk.uses()
        tenants = sorted({*device, *host, *disk} - {ANYBODY})
        return [messages.TenantUse(tenant, device[tenant], host[tenant], disk[tenant]) for tenant in tenants]

    # --- figures ----------------------------------------------------------------------------------------------------

    def use_of(self, session: Session) -> messages.SessionUse:
        residency, paging = self._scheduler.queues[session.model].residency, self._models[session.model].paging
        host, disk = paging.count(residency.lower_tiers.keys_not_held(session))
        return messages.SessionUse(
            session.id,
            _state(session, arrives=residency.is_arriving(session)),
            session.computed,
            residency.kv.pages_held(session.id),
            host,
            disk,
        )

    def fill(self, info: ModelInfo) -> None:
        """Fills in the figures of the model's tiers."""
        paging, pages = self._models[info.name].paging, self._models[info.name].transfers.host
        if paging.host is not None and pages is not None:
            info.host_pages, info.host_pages_used = paging.host.capacity, paging.host.used
            info.host_pages_pinned = pages.pinned
        if paging.disk is not None:
            info.disk_pages, info.disk_pages_used = paging.disk.capacity, paging.disk.used
        info.notes += self._notes(info.name)

    def stop(self) -> None:
        """Before the process exits: ends the threads that call the driver."""
        for model in self._models.values():
            if model.transfers.host is not None:
                model.transfers.host.stop()

    def _notes(self, name: str) -> list[str]:
        """Notes for the user about the model's tiers."""
        host = self._models[name].transfers.host
        if host is None or host.pinned == host.capacity:
            return []
        if host.failure is not None:
            return [f"pages on the host are not all pinned, and copies of the others are slow: {host.failure.message}"]
        return [f"pages on the host: {host.pinned:,} of {host.capacity:,} are pinned; until all are, steps are slower"]


def _state(session: Session, *, arrives: bool) -> str:
    if session.paused:
        return "paused"
    if arrives:
        return "arriving"
    if session.request is not None:
        return session.request.state.value
    return "waiting" if session.waits else "idle"
