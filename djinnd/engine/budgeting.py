"""Changes the device's memory budget while sessions run. Blocks and pages move between two steps; no session is lost.

A smaller budget first takes pages that no session holds. Then blocks are packed, or stream. Only if that is not enough,
sessions are evicted in the usual order: their pages go to the host, or are recomputed. A larger budget places the
models as a new load would, but drops no page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from djinn_client.errors import OutOfMemory
from djinnd.device import Device
from djinnd.device.budget import at_least, gib
from djinnd.engine.memory.memory import kv_floor, pages_share, plan_kv, takes_all
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.engine.tuning import MIN_TOKENS, ROOM
from djinnd.scheduler.scheduler import Scheduler
from djinnd.weights.plan import PlacementPlan, fewest_streams, least_bytes, plan_places


def change_budget(
    device: Device,
    runners: Collection[ModelRunner],
    scheduler: Scheduler,
    total: int,
    settle: Callable[[str], None] = lambda model: None,
) -> None:
    """Raises OutOfMemory with the least budget that would work, or with the bytes that the device lacks; nothing has
    changed then. `settle`: waits for the copies of a model's pages."""
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
    """Fits one model into another amount of memory."""

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
        # a part that does not change: rest and workspace
        self._fixed = runner.nbytes - runner.places.nbytes - runner.pages.nbytes

    @property
    def least(self) -> int:
        """Least bytes for the model: with fewer, its longest session could not run to its end."""
        blocks = (
            least_bytes(self._sizes, self._placing, self._staging) if self._can_move else self._runner.places.nbytes
        )
        return self._fixed + self._least_pages * self._runner.plan.page_bytes + blocks

    @property
    def _can_move(self) -> bool:
        return self._runner.weights.store.is_attached

    @property
    def _least_pages(self) -> int:
        reach = max(self._scheduler.queues[self._runner.name].reach, min(MIN_TOKENS, self._runner.plan.max_context))
        return self._runner.kv.pages_for(reach) + 1

    def into(self, nbytes: int, budget: int) -> None:
        """Moves blocks and pages so that the model takes at most `nbytes` of the device. `budget`: of the whole
        device."""
        for floor, may_stream in self._floors(budget):
            try:
                plan = self._plan(nbytes - self._fixed - floor)
            except OutOfMemory:
                continue
            if may_stream or len(plan.streamed) == fewest_streams(self._placing, len(self._sizes)):
                pages = self._pages(plan, nbytes - self._fixed - plan.nbytes, floor)
                self._scheduler.queues[self._runner.name].vacate(pages - 1, partial(self._settle, self._runner.name))
                try:
                    self._runner.move(plan, pages)
                # a bug of ours, and blocks have been moved halfway: let a new engine start from the host
                except OutOfMemory as error:
                    raise RuntimeError(f"{self._runner.name} did not fit where it was planned to") from error
                return
        raise AssertionError(f"{self._runner.name} was to fit {nbytes} bytes and does not")

    def _floors(self, budget: int) -> Iterator[tuple[int, bool]]:
        """Bytes of pages to plan with, best first, and whether more blocks may stream to make room for them."""
        runner = self._runner
        page = runner.plan.page_bytes
        held = int(ROOM * runner.kv.pool.used) + 1
        yield max(runner.pages.nbytes, runner.load.kv_bytes), False
        yield max(held * page, kv_floor(runner.shape, 0, budget), self._least_pages * page), True
        yield max(runner.kv.pool.used + 1, self._least_pages) * page, True
        yield self._least_pages * page, True

    def _plan(self, free: int) -> PlacementPlan:
        if not self._can_move:
            if self._runner.places.nbytes > free:
                raise OutOfMemory("the blocks have no copy on the host and cannot move")
            return self._runner.places
        share = pages_share(self._runner.load.kv_bytes)
        return plan_places(self._sizes, free, self._placing, self._staging, may_stream_more=True, pages_share=share)

    def _pages(self, plan: PlacementPlan, left: int, floor: int) -> int:
        runner = self._runner
        if runner.load.kv_bytes:
            return floor // runner.plan.page_bytes
        greedy = takes_all(self._placing, plan)
        wished = plan_kv(runner.shape, left, floor, 0, runner.plan.max_context, greedy).num_pages
        return min(wished, left // runner.plan.page_bytes)
