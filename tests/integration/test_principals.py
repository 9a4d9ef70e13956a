"""A principal without a Unix user, in the places that expect a uid: pages, tiers, text workers, the journal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import djinn_client as djinn
from djinnd.config.principals import number_of
from djinnd.confinement import landlock, seccomp
from tests.conftest import DaemonStarter
from tests.support.daemon import Daemon, descendants_of, lacks_tiers, wait_for
from tests.support.serving import TINY

MODEL = "djinn-tiny"
NAME = "robot"
QUOTA = {"users": [NAME], "device_kv": "64MiB", "host_kv": "64MiB", "disk_kv": "64MiB", "sessions": 8, "weight": 0.5}
PROMPT = list(range(5, 600))


@pytest.fixture(scope="module")
def robot() -> Iterator[tuple[Daemon, str]]:
    """A daemon, and the token of a name that has quotas of all kinds."""
    with DaemonStarter() as start:
        daemon = start({"quotas": {"robots": QUOTA}})
        with daemon.client() as admin:
            admin.load(MODEL)
            wait_for(lambda: not any(map(lacks_tiers, admin.models())))
            token = admin.add_token(NAME).token
        yield daemon, token


def workers(daemon: Daemon) -> list[int]:
    return [pid for pid in descendants_of(daemon.pid) if b"djinnd.text_worker" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_pages_of_a_name_use_all_tiers(robot: tuple[Daemon, str]) -> None:
    daemon, token = robot
    with djinn.Session(MODEL, address=daemon.address) as mine:
        alone = mine.generate(PROMPT, max_tokens=8).token_ids
    with djinn.Session(MODEL, address=daemon.address, token=token) as session, daemon.client() as admin:
        session.generate(PROMPT, max_tokens=1)
        session.truncate(len(PROMPT))
        for tier in ("host", "disk"):
            assert session.pause(tier).pages > 0
            held = {use.user_name: use for use in admin.quotas(all=True)}[NAME]
            assert getattr(held, f"{tier}_kv") > 0 and held.rule == "robots"
            session.unpause()
        with session.fork() as fork:
            assert fork.generate(max_tokens=8).token_ids == alone
            assert fork.info.user == number_of(NAME)
        assert admin.status(check=True).integrity == []


def test_models_of_a_name_are_read_as_nobody(robot: tuple[Daemon, str], tmp_path: Path) -> None:
    daemon, token = robot
    folder = tmp_path / "mine"
    shutil.copytree(TINY, folder)
    with djinn.Session(str(folder), address=daemon.address, token=token) as session, daemon.client() as admin:
        text = session.generate("def f(", max_tokens=4).text
        with djinn.Session(MODEL, address=daemon.address) as mine:
            assert mine.generate("def f(", max_tokens=4).text == text
        (worker,) = workers(daemon)
        if os.geteuid() == 0 and not (landlock.missing() or seccomp.missing()):
            assert os.stat(f"/proc/{worker}").st_uid == 65534
        (use,) = [use for use in admin.quotas(all=True) if use.user == number_of(NAME)]
        assert {each.name: each.used for each in use.resources}["models"] == 1
    with daemon.client() as admin:
        admin.unload(str(folder), force=True)


def test_functions_of_a_name_do_not_run(robot: tuple[Daemon, str]) -> None:
    daemon, token = robot
    with (
        djinn.Session(MODEL, address=daemon.address, token=token) as session,
        pytest.raises(djinn.NotPermitted, match="only of Unix users"),
    ):
        session.intervene("blocks.2", lambda activation, context: None)
