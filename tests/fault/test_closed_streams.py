"""A parent that has closed the standard descriptors: the daemon serves, restarts and stops as usual."""

from __future__ import annotations

import os
import signal

import pytest

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import wait_for


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-"])
def test_a_daemon_without_standard_streams_stops_with_status_0(start_daemon: DaemonStarter, closed: str) -> None:
    daemon = start_daemon(wrapper=["sh", "-c", f'exec "$@" {closed}', "sh"])
    for _ in range(2):
        for fd in range(3):
            assert os.readlink(f"/proc/{daemon.pid}/fd/{fd}") == os.devnull
        with djinn.Session(MODEL, address=daemon.address) as session:
            assert len(session.generate([1, 2], max_tokens=3, ignore_eos=True).token_ids) == 3
        count = len(daemon.notifications)
        with daemon.client() as client:
            client.restart()
        wait_for(lambda before=count: any(told.get("READY") == "1" for told in daemon.notifications[before:]))
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert daemon.left_behind() == []
