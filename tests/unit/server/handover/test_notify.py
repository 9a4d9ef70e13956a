from __future__ import annotations

import os
import socket

import pytest

from djinnd.server.handover.notify import Notifier


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_systemd_receives_notifications(folder, kind):
    address = f"{folder}/notify" if kind == "path" else f"\0djinnd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        Notifier({"NOTIFY_SOCKET": address.replace("\0", "@")}).tell(READY=1, STATUS="serving")
        assert listener.recv(100) == b"READY=1\nSTATUS=serving"


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "/nowhere/notify"}])
def test_without_a_listener_nothing_happens(environ):
    Notifier(environ).tell(READY=1)


def test_a_listener_that_does_not_read_delays_nothing(folder):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"{folder}/notify")
        notifier = Notifier({"NOTIFY_SOCKET": f"{folder}/notify"})
        for number in range(2000):  # more than the queue of a datagram socket holds
            notifier.tell(STATUS=number)
        assert listener.recv(100) == b"STATUS=0"


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),
    ],
)
def test_the_watchdog_applies_to_this_process_only(environ, seconds):
    assert Notifier(environ).watchdog_s == seconds
