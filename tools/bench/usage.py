"""What a daemon has where, over time: what its sessions would like to have on the device, and what is on each tier."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Self

import djinn_client as djinn

PERIOD_S = 0.5  # the daemon looks at every session to answer


class Usage:
    """Samples as long as its context lasts. `points`, in bytes but for `seconds`:

    logical    weights, and the KV of all tokens that sessions have come by
    device     weights, workspace and pages: of the budget, what the daemon uses
    pages      on the device that sessions hold
    host       pages in host memory
    disk       pages in the file
    resident   of the daemon's processes, as the kernel counts them: shared memory that they have touched included
    """

    def __init__(self, address: str, info: djinn.ModelInfo) -> None:
        self.points: list[dict[str, float]] = []
        self._info = info
        self._token_bytes = info.page_bytes // info.page_size
        self._tokens = 0
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
            if self._stop.wait(PERIOD_S):
                return

    def _point(self) -> dict[str, float]:
        status = self._client.status()
        model = next(model for model in status.models if model.name == self._info.name)
        device = status.devices[0]
        return {
            "seconds": round(time.monotonic() - self._began, 3),
            "logical": model.weight_bytes + self._tokens * self._token_bytes,
            "device": device.used_bytes,
            "pages": model.pages_used * model.page_bytes,
            "host": model.host_pages_used * model.page_bytes,
            "disk": model.disk_pages_used * model.page_bytes,
            "resident": resident_bytes(status.pid) + resident_bytes(device.pid),
        }


def resident_bytes(pid: int) -> int:
    """0 for a process that is gone."""
    try:
        found = re.search(r"^VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) * 1024 if found else 0
