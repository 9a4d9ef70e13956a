"""Changing the device's budget while sessions run: blocks and pages move, between two steps, and no session is lost.

Less memory: pages that nobody holds go first; then blocks are packed or stream; only where that is not enough do
sessions give up pages, in the order of eviction: they go to the host, or are computed anew. More
memory: as if the models were loaded again, but that no page is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from djinn_client.errors import OutOfMemory
from djinnd.device import Device
from djinnd.device.budget import at_least, gib
from djinnd.engine.memory import MIN_TOKENS, kv_floor, pages_share, plan_kv, takes_all
from djinnd.engine.model_runner import ModelRunner
from djinnd.scheduler.scheduler import Scheduler
from djinnd.weights.plan import Plan, fewest_streams, least_bytes, plan_places

_ROOM = 1.25  # pages beside those that are held, so that sessions can go on


def change_budget(
    device: Device,
    runners: Collection[ModelRunner],
    scheduler: Scheduler,
    total: int,
    settle: Callable[[str], None] = lambda model: None,
) -> None:
    """Raises OutOfMemory with the figure that the budget could go down to, or that the device lacks; then nothing has
    changed. `settle`: ends what is being copied of a model's pages."""
    least = device.reserved + sum(Refit(runner, scheduler).least for runner in runners)
    if total < least:
        raise OutOfMemory(
            f"a budget of {gib(total)} is too small: the models and sessions that are loaded need {at_least(least)}",
            needed=least,
            budget=total,
        )
    grows = total > device.budget.total
    if grows:
        device.resize(total)
    for runner in sorted(runners, key=lambda runner: runner.nbytes, reverse=True):
        missing = device.budget.used - total
        if grows or missing > 0:
            refit = Refit(runner, scheduler, settle)
            refit.into(max(runner.nbytes - missing, refit.least), total)
    if not grows:
        device.resize(total)


class Refit:
    """One model, to be put into another amount of memory."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, settle: Callable[[str], None] = lambda model: None
    ) -> None:
        self._settle = settle
        self._runner = runner
        self._scheduler = scheduler
        store = runner.weights.store
        self._sizes = store.sizes(runner.weights.dtype)
        self._staging = max((form.nbytes for form in store.forms if form is not None), default=0)
        self._placing = runner.load.placing
        self._fixed = runner.nbytes - runner.places.nbytes - runner.pool_bytes  # what does not change: rest, workspace

    @property
    def least(self) -> int:
        """Bytes below which a session could not be run to its end."""
        blocks = (
            least_bytes(self._sizes, self._placing, self._staging) if self._can_move else self._runner.places.nbytes
        )
        return self._fixed + self._least_pages * self._runner.plan.page_bytes + blocks

    @property
    def _can_move(self) -> bool:
        return self._runner.weights.store.is_attached

    @property
    def _least_pages(self) -> int:
        reach = max(self._scheduler.reach(self._runner.name), min(MIN_TOKENS, self._runner.plan.max_context))
        return self._runner.kv.pages_for(reach) + 1

    def into(self, nbytes: int, budget: int) -> None:
        """`nbytes` for all that the model has on the device; the rest of `budget` is not its own."""
        for floor, may_stream in self._floors(budget):
            try:
                plan = self._plan(nbytes - self._fixed - floor)
            except OutOfMemory:
                continue
            if may_stream or len(plan.streamed) == fewest_streams(self._placing, len(self._sizes)):
                pages = self._pages(plan, nbytes - self._fixed - plan.nbytes, floor)
                self._scheduler.vacate(self._runner.name, pages - 1, partial(self._settle, self._runner.name))
                try:
                    self._runner.move(plan, pages)
                except OutOfMemory as error:  # our fault, and blocks are half-way: another engine starts from the host
                    raise RuntimeError(f"{self._runner.name} did not fit where it was planned to") from error
                return
        raise AssertionError(f"{self._runner.name} was to fit {nbytes} bytes and does not")

    def _floors(self, budget: int) -> Iterator[tuple[int, bool]]:
        """Bytes of pages to plan with, the most welcome first, and whether more blocks may stream for their sake."""
        runner = self._runner
        page = runner.plan.page_bytes
        held = int(_ROOM * runner.kv.pool.used) + 1
        yield max(runner.pool_bytes, runner.load.kv_bytes), False
        yield max(held * page, kv_floor(runner.shape, 0, budget), self._least_pages * page), True
        yield max(runner.kv.pool.used + 1, self._least_pages) * page, True
        yield self._least_pages * page, True

    def _plan(self, free: int) -> Plan:
        if not self._can_move:
            if self._runner.places.nbytes > free:
                raise OutOfMemory("the blocks have no copy on the host and cannot move")
            return self._runner.places
        share = pages_share(self._runner.load.kv_bytes)
        return plan_places(self._sizes, free, self._placing, self._staging, may_stream_more=True, pages_share=share)

    def _pages(self, plan: Plan, left: int, floor: int) -> int:
        runner = self._runner
        if runner.load.kv_bytes:
            return floor // runner.plan.page_bytes
        greedy = takes_all(self._placing, plan)
        wished = plan_kv(runner.shape, left, floor, 0, runner.plan.max_context, greedy).num_pages
        return min(wished, left // runner.plan.page_bytes)
