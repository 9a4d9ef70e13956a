"""A daemon that a test kills and starts again, with the same socket and state directory."""

from __future__ import annotations

import os
import signal
from typing import Any

from djinnd.server.checkpoints.names import known_models
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import Daemon, wait_for


class Lives:
    """`now` is the running daemon. Its engine may be killed too, at most four times a minute: the daemon then starts no
    further engine."""

    def __init__(self, start: DaemonStarter, model: dict[str, Any], **config: Any) -> None:
        """`model`: configuration of djinn-tiny."""
        self._start = start
        source = {"path": known_models({})[MODEL].path, "preload": True}
        self._config = {"models": {MODEL: source | model}} | config
        self.now = self._begin(self._config)
        self.address = self.now.address
        self.state = self.now.folder / "state"
        self._config |= {"socket": self.address, "state_dir": str(self.state)}

    def _begin(self, config: dict[str, Any], ready: bool = True) -> Daemon:
        return self._start(config, ready=ready, errors=["engine_lost", "model_failed"])

    def kill(self) -> None:
        self.now.kill()

    def stop(self) -> None:
        """A clean stop, as by a service manager."""
        self.now.signal(signal.SIGTERM)
        assert self.now.wait() == 0, self.now.log

    def again(self, *, ready: bool = True) -> None:
        """Starts the next daemon, after this one has ended. See DaemonStarter for `ready`. The calling thread must
        outlive the daemon, which ends with the thread that starts it."""
        self.now = self._begin(self._config, ready)
        self.now.address = self.address

    def engine(self) -> int:
        """The pid of the current engine, which may still be starting."""
        wait_for(lambda: self.now.device().pid)
        return self.now.device().pid

    def kill_engine(self) -> None:
        os.kill(self.engine(), signal.SIGKILL)

    def wait_for_tiers(self, disk: bool = True) -> None:
        """The tiers come a moment after the model."""

        def are_there() -> bool:
            with self.now.client() as client:
                model = next(info for info in client.models() if info.name == MODEL)
            return model.host_pages > 0 and (model.disk_pages > 0 or not disk)

        wait_for(are_there)

    @property
    def log(self) -> str:
        return self.now.log
