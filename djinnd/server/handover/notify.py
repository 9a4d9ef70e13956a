"""Notifications to systemd: readiness, a line of status, and that the event loop runs. See sd_notify(3)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress


class Notifier:
    """Sends notifications. Does nothing if there is no service manager."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = int(environ.get("WATCHDOG_USEC", "0")) if is_ours else 0
        self.watchdog_s = usec / 1e6  # 0: no watchdog

    def tell_reloading(self) -> None:
        """Announces a reload, or a restart. It lasts until READY is sent."""
        self.tell(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)

    def tell(self, **values: str | int) -> None:
        """Sends values, for example tell(READY=1, STATUS="serving"). Never waits: if the reader is slow, the message is
        lost."""
        if self._address:
            message = "\n".join(f"{name}={value}" for name, value in values.items())
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(message.encode(), self._address)
