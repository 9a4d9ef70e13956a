from __future__ import annotations

import asyncio
import os
import sys

import pytest

from djinn_client.errors import Busy, ModelNotFound
from djinnd.config import Limits
from djinnd.server.checkpoints import hub


@pytest.fixture
def fetcher(monkeypatch):
    """Downloads run this Python program instead; `sys.argv[1]` is the hub id."""

    def use(text):
        monkeypatch.setattr(hub, "python_module", lambda name, *options: [sys.executable, "-c", text, *options])

    return use


def test_loads_of_one_id_share_a_download_and_its_outcome(fetcher, tmp_path):
    fetcher(f"import os, sys; os.mkdir('{tmp_path}/' + sys.argv[1].replace('/', '-')); print('folder /there', end='')")

    async def main():
        models = hub.Hub(Limits())
        assert await asyncio.gather(*(models.folder("org/one", user) for user in range(4))) == ["/there"] * 4

    asyncio.run(main())
    assert os.listdir(tmp_path) == ["org-one"]


def test_the_library_s_error_is_passed_on_and_a_dead_process_is_an_error(fetcher):
    async def failing(text):
        fetcher(text)
        with pytest.raises(ModelNotFound) as caught:
            await hub.Hub(Limits()).folder("org/name", 1)
        return caught.value.message

    assert asyncio.run(failing("print('error no such thing', end='')")) == "no such thing"
    assert "status -9" in asyncio.run(failing("import os; os.kill(os.getpid(), 9)"))


def test_a_download_that_hangs_delays_no_other_and_is_killed(fetcher):
    fetcher("import sys, time; time.sleep(600) if 'slow' in sys.argv[1] else print('folder /there', end='')")

    async def main():
        models = hub.Hub(Limits(downloads_per_user=1))
        slow = asyncio.create_task(models.folder("org/slow", 1))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="1 downloads"):
            await models.folder("org/slower", 1)
        assert await models.folder("org/fast", 2) == "/there"
        models.stop()
        await models.close()
        with pytest.raises(asyncio.CancelledError):
            await slow
        models.limits = Limits(hub_download=0.05)
        with pytest.raises(ModelNotFound, match=r"within 0\.05 s"):
            await models.folder("org/slow", 1)
        models.limits = Limits()
        assert await models.folder("org/fast", 1) == "/there"

    asyncio.run(main())
