"""Daemons for the tests that need a real one. Each is stopped, and has then left nothing, whatever a test did to it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.daemon import Daemon

# A busy machine is no failure: only benchmarks measure time. The examples are the same each time, so that only a change
# can break a test; with DJINND_TEST_EXPLORE set they are new ones.
settings.register_profile(
    "djinnd",
    deadline=None,
    derandomize="DJINND_TEST_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("djinnd")

MODEL = "djinn-tiny"
# The longest files are begun first: at the end a worker would wait for another one's.
FIRST = (
    *("families/test_page.py", "unit/model/kernels/test_interpreted.py"),
    *("fault/test_bad_functions.py", "fault/test_bad_input.py", "fault/test_engine_killed.py", "fault/test_kills.py"),
    *("fault/test_hostile_models.py", "fault/test_under_attack.py", "integration/test_remote_bench.py"),
    *("integration/test_kv_bench.py", "integration/test_sharing.py", "integration/test_walks.py"),
    *("conformance/test_generation.py", "unit/server/test_restart.py", "unit/tools/test_make_model.py"),
    *("unit/engine/test_breakpoints.py", "unit/engine/test_budgeting.py"),
    *("unit/model/kernels/experts/test_cubins.py", "unit/model/test_families.py", "unit/model/states/test_hybrids.py"),
)


def pytest_configure() -> None:
    """A shell that starts the tests in the background makes them and their children ignore Ctrl-C. Then a test that
    sends it would wait in vain."""
    os.environ.pop("DJINND_TOKEN", None)  # it may be set for the user's own daemon
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # the order that is random otherwise is known then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """If workers share the tests, all tests of a file go to one worker, so that they share their fixtures. Daemons of
    two workers do not meet: each has a folder of its own, and leaves the other's objects in /dev/shm alone.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_file_of(item)))
    assert all((Path(__file__).parent / file).exists() for file in FIRST)
    items.sort(key=lambda item: _file_of(item) not in FIRST)


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0].removeprefix("tests/")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Does without garbage collections, which would walk through torch for each few tests that are found. Imported
    modules are exempt from them later, too."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """For tests that leave it as it was. It serves djinn-tiny, in float32 as every CPU does."""
    with DaemonStarter() as start:
        running = start()
        with running.client() as client:
            client.load(MODEL)
        yield running


@pytest.fixture(scope="session")
def daemon_address(daemon: Daemon) -> str:
    return daemon.address


@pytest.fixture
def start_daemon() -> Iterator[DaemonStarter]:
    """`start_daemon(config, flags=…)`: a daemon of the test's own."""
    with DaemonStarter() as start:
        yield start


class DaemonStarter:
    """Daemons in folders of their own. The paths are short: a socket's may have 107 bytes, and pytest's have more."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __call__(self, config: dict[str, Any] | None = None, *, ready: bool = True, **options: Any) -> Daemon:
        """See Daemon for the arguments. Returns when it is ready, or without `ready` at once."""
        daemon = self._stack.enter_context(Daemon(self.folder(), config, **options))
        if ready:
            daemon.wait_until_ready()
        return daemon

    def folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="djinnd-", dir="/tmp"))
        self._stack.callback(shutil.rmtree, folder)
        return folder

    def __enter__(self) -> DaemonStarter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
