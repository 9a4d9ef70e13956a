"""A pool that grows or shrinks while sessions have pages in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from djinnd.device.cpu import CpuDevice
from djinnd.engine.run.model_runner import ModelRunner
from tests.support.loaded import MEMORY, Served, by_block
from tests.support.models import reduced_model

FOLDER = reduced_model("llama-3.1")


@contextmanager
def serving() -> Iterator[Served]:
    device = CpuDevice(MEMORY)
    with Served(FOLDER, device) as served:
        yield served
    assert device.budget.used == 0
    device.close()


def written(served: Served, count: int, tokens: int) -> dict[str, Tensor]:
    """Opens `count` sessions with pages of random bytes. → the bytes of each session's pages."""
    kv, pool = served.runner.kv, served.runner.model.pool
    for number in range(count):
        session = served.open(tenant=number)
        session.tokens = [1] * tokens
        kv.reserve(session.id, session.tenant, tokens)
        session.computed = tokens
    with torch.inference_mode():  # like everything that writes there
        pool[1:].random_(256)
    return contents(served)


def contents(served: Served) -> dict[str, Tensor]:
    kv = served.runner.kv
    return {name: served.runner.model.pool[kv.pages_of(name)].clone() for name in kv.sessions}


def same_pages(served: Served, wanted: dict[str, Tensor]) -> bool:
    found = contents(served)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def resize(runner: ModelRunner, num_pages: int) -> None:
    runner.move(runner.places, num_pages)
    runner.kv.check_integrity()
    assert runner.plan.num_pages == num_pages and runner.device.budget.used == runner.nbytes


@pytest.mark.parametrize("room", [True, False], ids=["beside the old pool", "by way of the host"])
@pytest.mark.parametrize("held", [0, 1, 40])
def test_pages_in_use_keep_their_bytes_and_all_others_are_zeroed(room: bool, held: int) -> None:
    with serving() as served:
        runner, budget = served.runner, served.device.budget
        resize(runner, 100)
        for name in list(runner.kv.sessions):
            runner.kv.drop(name)
        wanted = written(served, held, 300)
        served.scheduler.close(next(iter(wanted))) if held > 1 else None  # leaves a hole
        wanted = contents(served)
        page = runner.plan.page_bytes
        for num_pages in (99, 90, 100, 81 if held else 2, 130):
            reserved = (
                budget.free - max(0, num_pages - runner.plan.num_pages) * page - (num_pages * page if room else 0)
            )
            budget.reserve("somebody else", max(0, reserved))
            runner.move(runner.places, num_pages)
            budget.release("somebody else")
            assert runner.plan.num_pages == num_pages and budget.used == runner.nbytes
            served.scheduler.check_integrity()
            assert same_pages(served, wanted)
            kept = [page for name in wanted for page in runner.kv.pages_of(name)]
            others = [page for page in range(1, num_pages) if page not in kept]
            assert not bool(runner.model.pool[others].any())
        for index, paged in enumerate(runner.model.paged):
            assert paged.keys.data_ptr() == by_block(runner.model)[:, index, 0].data_ptr()


def test_a_moved_page_is_zeroed_for_another_tenant() -> None:
    with serving() as served:
        runner = served.runner
        resize(runner, 20)
        written(served, 8, 500)
        for session in list(served.scheduler.sessions())[:6]:
            served.scheduler.close(session.id)
        runner.kv.reserve("heir", tenant=99, tokens=600)  # another tenant's pages, not zeroed yet
        resize(runner, 14)
        with torch.inference_mode():
            runner.pages.zero_stale()
        assert not bool(runner.model.pool[runner.kv.pages_of("heir")].any())
        runner.kv.drop("heir")


def test_resizing_below_the_pages_in_use_is_an_assertion() -> None:
    with serving() as served:
        written(served, 4, 300)
        with pytest.raises(AssertionError, match="8 pages are held"):
            served.runner.move(served.runner.places, 8)


def test_a_copied_page_has_the_bytes_of_its_source() -> None:
    with serving() as served:
        wanted = written(served, 2, 100)
        (source,), (target,) = (served.runner.kv.pages_of(name) for name in wanted)
        served.runner.pages.copy(source, target)
        pool = served.runner.pages.bytes_now()
        assert torch.equal(pool[target], pool[source]) and bool(pool[source].any())


def test_the_first_half_of_a_page_holds_the_first_blocks() -> None:
    with serving() as served:
        pages, placement = served.runner.pages, served.runner.model.placement
        assert 0 < placement.half < 4, "of four blocks"
        assert pages.half_bytes == pages.plan.page_bytes * placement.half // 4
