"""`pytest --workers 4`: processes that are forked when the tests have been collected and share them, file by file.
Imports and the collection, half a minute, so happen once. Daemons of all workers are forked from the same
processes, and small checkpoints are written once. A group of pytest-xdist's stays together here, too.

    this process ──numbers of groups──► a pipe that all workers read
                 ◄──its reports──────── each worker
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

from djinnd.lifeline import tie_to

_NUMBER = 4  # bytes of a group's number; pipes hold 16,384 of them
Group = list[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that share the tests; 0: this one runs them")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Starts the processes that workers share. They import while this process collects the tests."""
    if session.config.getoption("workers") and not session.config.option.collectonly:
        from tests.support import daemon, forked, models  # imports torch, which runs of a few files do without

        daemon._warm_forks()
        for module in (forked.REAL, forked.SERVED):
            forked._parent(module)
        models._cache()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Returns when all tests have run, with what workers have reported."""
    count = session.config.getoption("workers")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop
    groups = _groups(session.items)
    assert len(groups) * _NUMBER <= 1 << 16
    queue, numbers = os.pipe()
    os.write(numbers, b"".join(index.to_bytes(_NUMBER) for index in range(len(groups))))
    os.close(numbers)
    base = session.config._tmp_path_factory.getbasetemp()
    gc.freeze()  # a worker's collector would walk, and so copy, what it shares with the others
    living = dict(_fork(session, groups, queue, base / f"worker-{index}") for index in range(count))
    try:
        _relay(session, living, queue)
    finally:
        os.close(queue)
        for reports, pid in living.items():  # interrupted: so are they
            reports.close()
            os.waitpid(pid, 0)
    return True


def _groups(items: Sequence[pytest.Item]) -> list[Group]:
    """In the order of their first tests. A test without a group belongs to its file."""
    found: dict[str, Group] = {}
    for item in items:
        marker = item.get_closest_marker("xdist_group")
        found.setdefault(marker.args[0] if marker else str(item.path), []).append(item)
    return list(found.values())


def _relay(session: pytest.Session, living: dict[Connection, int], queue: int) -> None:
    """Hands the reports of all workers to this process's plugins, until each worker has ended."""
    hook, running = session.config.hook, dict[Connection, str | None]()
    while living:
        for reports in wait(list(living)):
            assert isinstance(reports, Connection)
            try:
                told = reports.recv()
            except EOFError:
                _, status = os.waitpid(living.pop(reports), 0)
                reports.close()
                if test := running.get(reports, "a worker"):
                    hook.pytest_runtest_logreport(report=_death(test, status))
                continue
            if told is None or isinstance(told, str):
                running[reports] = told
            else:
                report = hook.pytest_report_from_serializable(config=session.config, data=told)
                hook.pytest_runtest_logreport(report=report)
        if session.shouldfail or session.shouldstop:
            while os.read(queue, 1 << 16):  # workers find no other group
                pass
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


def _death(test: str, status: int) -> pytest.TestReport:
    text = f"the worker ended with exit status {os.waitstatus_to_exitcode(status)}; other tests of its file did not run"
    return pytest.TestReport(test, (test.partition("::")[0], None, test), {}, "failed", text, "call")


# --- a worker -------------------------------------------------------------------------------------------------------


class _Reports:
    """A plugin that sends what the tests of this process report."""

    def __init__(self, session: pytest.Session, to: Connection) -> None:
        self._config = session.config
        self._to = to

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._to.send(nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._to.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _fork(session: pytest.Session, groups: list[Group], queue: int, folder: Path) -> tuple[Connection, int]:
    """→ where the reports of a new worker arrive, and its pid. The worker does not return."""
    reports, theirs = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    if pid := os.fork():
        theirs.close()
        return reports, pid
    status: Any = 1
    try:
        tie_to(parent)
        reports.close()
        _be_apart(session, theirs, folder)
        for item, following in pairwise(chain(_tests(groups, queue), [None])):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        theirs.send(None)  # it has run all that it took
        status = 0
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def _be_apart(session: pytest.Session, reports: Connection, folder: Path) -> None:
    """From now on this process has a capture and a folder of its own, and prints nothing."""
    plugins = session.config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folder.mkdir(0o700)
    session.config._tmp_path_factory._basetemp = folder
    plugins.register(_Reports(session, reports))


def _tests(groups: list[Group], queue: int) -> Iterator[pytest.Item]:
    """Takes the next group when its first test is asked for."""
    while number := os.read(queue, _NUMBER):
        yield from groups[int.from_bytes(number)]
