from __future__ import annotations

import asyncio
import threading

import pytest

from djinn_client.errors import ModelRejected, Retry
from djinnd.server.system.slow_files import PLACES, SlowFiles


def stuck(released, threads=None):
    """Work that runs until `released` is set."""

    def work():
        if threads is not None:
            threads.append(threading.current_thread())
        released.wait(60)
        return "late"

    return work


def test_results_and_errors_of_the_work_are_passed_on():
    async def main():
        files = SlowFiles(60)
        assert await files.run(1, lambda: 5) == 5

        def fail():
            raise ModelRejected("no")

        with pytest.raises(ModelRejected):
            await files.run(1, fail)
        assert await files.run(1, lambda: 6) == 6

    asyncio.run(main())


def test_no_user_waits_behind_another_user_s_files():
    released = threading.Event()

    async def main():
        files = SlowFiles(60)
        hanging = [asyncio.create_task(files.run(1, stuck(released))) for _ in range(3 * PLACES)]
        await asyncio.sleep(0)
        assert [await files.run(2, lambda number=number: number) for number in range(3 * PLACES)] == [*range(12)]
        released.set()
        assert await asyncio.gather(*hanging) == ["late"] * len(hanging)

    asyncio.run(main())


def test_one_user_holds_a_few_threads_for_any_number_of_calls():
    released, threads = threading.Event(), []

    async def main():
        files = SlowFiles(0.05)
        for _ in range(3):
            tries = [files.run(1, stuck(released, threads)) for _ in range(PLACES)]
            told = await asyncio.gather(*tries, return_exceptions=True)
            assert all(isinstance(error, Retry) for error in told), told
        assert len(threads) == PLACES
        files.seconds = 60
        released.set()
        assert await files.run(1, lambda: "again") == "again"

    asyncio.run(main())


def test_a_late_result_is_discarded():
    released, discarded = threading.Event(), threading.Event()

    async def main():
        files = SlowFiles(0.05)
        with pytest.raises(Retry):
            await files.run(1, stuck(released), lambda _: discarded.set())
        released.set()
        assert await asyncio.to_thread(discarded.wait, 60)

    asyncio.run(main())


def test_a_cancelled_caller_leaves_nothing_open():
    released, discarded = threading.Event(), threading.Event()

    async def main():
        task = asyncio.create_task(SlowFiles(60).run(1, stuck(released), lambda _: discarded.set()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()
        assert await asyncio.to_thread(discarded.wait, 60)

    asyncio.run(main())
