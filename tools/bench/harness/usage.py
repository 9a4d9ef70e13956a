"""What a daemon has where, over time: what its sessions would like to have on the device, what is on each tier, and how
much leaves the device and comes back."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import djinn_client as djinn

PERIOD_S = 0.5  # the daemon looks at every session to answer


class Traffic:
    """Pages that sessions have given up, and have got back, in all: as far as looking at them now and then tells."""

    def __init__(self) -> None:
        self.left = 0
        self.arrived = 0
        self._held: Mapping[str, int] = {}
        self._away: Counter[str] = Counter()  # that a session has given up and not got back

    def look(self, held: Mapping[str, int]) -> None:
        """`held`: pages on the device, by session."""
        for session, pages in held.items():
            change = pages - self._held.get(session, 0)
            back = min(change, self._away[session])  # what comes beyond that is new
            self._away[session] -= back
            self.left += max(0, -back)
            self.arrived += max(0, back)
        self._held = held


class Usage:
    """Samples as long as its context lasts. `points`, in bytes but for `seconds`:

    logical    weights, and the KV of all tokens that sessions have come by
    device     weights, workspace and pages: of the budget, what the daemon uses
    pages      on the device that sessions hold
    host       pages in host memory
    disk       pages in the file
    left       pages that sessions of this user have given up since the beginning
    arrived    and those of them that they have again
    resident   of the daemon's processes, as the kernel counts them: shared memory that they have touched included
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
        """So many more are in sessions."""
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
    """0 for a process that is gone."""
    try:
        found = re.search(r"^VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) * 1024 if found else 0
