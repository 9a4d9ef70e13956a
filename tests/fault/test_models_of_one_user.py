"""A user that brings model after model fills neither the daemon nor /dev/shm. Its loaded models count, it is refused at
its limit, and all others are served."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client import errors
from djinnd.server.arenas.header import HEADER_BYTES
from tests.support.other_user import as_user, only_root, open_to_all
from tests.support.scripted_engine.script import Script
from tests.support.served import Served, wait_for
from tests.support.serving import TINY

MALLORY, BOB = 23001, 23002
WEIGHTS, PAGES = HEADER_BYTES + (1 << 16), HEADER_BYTES + (1 << 20)  # of a model of the scripted engine
pytestmark = [only_root, pytest.mark.smoke]


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    limits = {"models_per_user": 3, "arena_bytes_per_user": f"{2 * (WEIGHTS + PAGES)}B"}
    daemon = serve(Script(pages=1 << 20), limits=limits, models={"ours": {"path": str(TINY)}})
    open_to_all(daemon.folder, daemon.address)
    return daemon


def checkpoints(served: Served, user: int, count: int) -> list[str]:
    """Checkpoint folders of this user."""
    folders = [served.folder / str(user) / str(number) for number in range(count)]
    for folder in folders:
        folder.mkdir(parents=True)
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(TINY / name, folder)
            os.chown(folder / name, user, user)
    return [str(folder) for folder in folders]


def load(served: Served, folder: str, **sizes: int) -> None:
    assert djinn.load(folder, address=served.address, **sizes).name == folder


def held(served: Served, user: int) -> tuple[int, int]:
    """The user's models and bytes, as `djinnctl quota` shows them."""
    with as_user(user):
        (use,) = djinn.quotas(address=served.address)
    told = {each.name: each.used for each in use.resources}
    return told["models"], told["arena_bytes"]


def shared_memory(served: Served) -> int:
    return sum(Path("/dev/shm", name).stat().st_size for name in map(os.path.basename, served.arena()))


def test_models_count_until_they_are_unloaded(served: Served) -> None:
    folders = checkpoints(served, MALLORY, 4)
    with as_user(MALLORY):
        for folder in folders[:3]:
            load(served, folder, host_kv_bytes=0)
        told = r"you have 3 loaded models.*limits\.models_per_user is 3: unload"
        for call in (djinn.load, djinn.Session, djinn.load):
            with pytest.raises(errors.QuotaExceeded, match=told):
                call(folders[3], address=served.address)
        load(served, folders[0])
        djinn.load("ours", address=served.address)
    assert held(served, MALLORY) == (3, 3 * WEIGHTS)
    (his,) = checkpoints(served, BOB, 1)
    with as_user(BOB), djinn.Session(his, address=served.address) as s:
        assert s.generate("def f(", max_tokens=2).token_ids
    with as_user(MALLORY):
        djinn.unload(folders[1], address=served.address)
        load(served, folders[3], host_kv_bytes=0)
        for folder in (folders[0], *folders[2:]):
            djinn.unload(folder, address=served.address)
    assert held(served, MALLORY) == (0, 0)


def test_too_much_shared_memory_is_refused(served: Served) -> None:
    folders = checkpoints(served, MALLORY, 3)
    with as_user(MALLORY):
        for folder in folders[:2]:
            load(served, folder)
    wait_for(lambda: held(served, MALLORY) == (2, 2 * (WEIGHTS + PAGES)))
    before = shared_memory(served)
    with as_user(MALLORY):
        with pytest.raises(errors.QuotaExceeded, match=r"limits\.arena_bytes_per_user is .*: unload one") as caught:
            load(served, folders[2])
        assert caught.value.data["used"] == 2 * (WEIGHTS + PAGES)
    assert (held(served, MALLORY)[0], shared_memory(served)) == (2, before)
    (his,) = checkpoints(served, BOB, 1)
    with as_user(BOB):
        load(served, his)
    wait_for(lambda: held(served, BOB) == (1, WEIGHTS + PAGES))


def test_a_model_without_room_for_host_pages_is_served_without_them(served: Served) -> None:
    folders = checkpoints(served, MALLORY, 2)
    with as_user(MALLORY):
        load(served, folders[0], host_kv_bytes=2 << 20)
        load(served, folders[1])

    def notes() -> list[str]:
        return [note for model in djinn.models(address=served.address) for note in model.notes]

    wait_for(lambda: any("limits.arena_bytes_per_user is" in note for note in notes()))
    with as_user(MALLORY), djinn.Session(folders[1], address=served.address) as s:
        assert s.generate("def f(", max_tokens=2).token_ids


def test_a_restart_keeps_models_charged_to_their_user(served: Served) -> None:
    folders = checkpoints(served, MALLORY, 4)
    with as_user(MALLORY):
        for folder in folders[:3]:
            load(served, folder, host_kv_bytes=0)
    served.start_again(kill=True)
    os.chmod(served.address, 0o666)
    with as_user(MALLORY), pytest.raises(errors.QuotaExceeded, match="3 loaded models"):
        load(served, folders[3])
    assert held(served, MALLORY)[0] == 3


def test_an_administrator_s_models_are_not_charged(served: Served) -> None:
    for folder in checkpoints(served, 0, 4):
        load(served, folder)
    assert held(served, 0) == (0, 0)
