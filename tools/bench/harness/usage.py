"""A daemon's memory over time: its sessions' demand, the use of each tier, and the pages that leave and come back."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import djinn_client as djinn

PERIOD_S = 0.5  # the daemon looks at every session for each sample


class Traffic:
    """Pages that sessions have given up and got back since the beginning, as far as samples show it."""

    def __init__(self) -> None:
        self.left = 0
        self.arrived = 0
        self._held: Mapping[str, int] = {}
        self._away: Counter[str] = Counter()  # pages of a session that have left and not come back

    def look(self, held: Mapping[str, int]) -> None:
        """Compares with the sample before. `held`: pages on the device, by session."""
        for session, pages in held.items():
            change = pages - self._held.get(session, 0)
            back = min(change, self._away[session])  # further pages are new ones
            self._away[session] -= back
            self.left += max(0, -back)
            self.arrived += max(0, back)
        self._held = held


class Usage:
    """Takes samples as long as its context lasts. A sample has `seconds`, and in bytes:

    logical    weights, and the KV of all tokens that sessions have.
    device     the daemon's use of the device's budget: weights, workspace and pages.
    pages      pages on the device that sessions hold.
    host       pages in host memory.
    disk       pages in the file.
    left       pages that this user's sessions have given up since the beginning.
    arrived    pages that they have got back.
    resident   memory of the daemon's processes, as the kernel counts it: touched shared memory included.
    """

    def __init__(self, address: str, info: djinn.ModelInfo, period_s: float = PERIOD_S) -> None:
        self.points: list[dict[str, float]] = []
        self._info = info
        self._period_s = period_s
        self._token_bytes = info.page_bytes // info.page_size
        self._tokens = 0
        self._traffic = Traffic()
        self._client = djinn.Client(address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="usage", daemon=True)

    def count(self, tokens: int) -> None:
        """Adds tokens to the sessions' total."""
        self._tokens += tokens

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.points.append(self._point())
        self._client.close()

    def _sample(self) -> None:
        while True:
            self.points.append(self._point())
            if self._stop.wait(self._period_s):
                return

    def _point(self) -> dict[str, float]:
        status = self._client.status()
        model = next(model for model in status.models if model.name == self._info.name)
        device = status.devices[0]
        self._traffic.look({session.id: session.pages for session in self._client.sessions()})
        return {
            "seconds": round(time.monotonic() - self._began, 3),
            "logical": model.weight_bytes + self._tokens * self._token_bytes,
            "device": device.used_bytes,
            "pages": model.pages_used * model.page_bytes,
            "host": model.host_pages_used * model.page_bytes,
            "disk": model.disk_pages_used * model.page_bytes,
            "left": self._traffic.left * model.page_bytes,
            "arrived": self._traffic.arrived * model.page_bytes,
            "resident": resident_bytes(status.pid) + resident_bytes(device.pid),
        }


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it is gone."""
    try:
        found = re.search(r"^VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) * 1024 if found else 0
