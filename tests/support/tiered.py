"""An engine with lower tiers, from its server's side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from djinnd import messages
from tests.support import reference
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model

FOLDER = reduced_model("llama-2")
TIER = 32 << 20  # bytes: dozens of pages
PROMPT = random_prompt(600, 512, 0)  # three pages
NEW = 6


class Tiered(EngineThread):
    def __enter__(self) -> Tiered:
        return self

    def load_with_tiers(self, disk: Path | None = None, **more: Any) -> None:
        """Loads llama-2, as "m" unless `more` has a name. Returns when its tiers are set up."""
        folder = "" if disk is None else str(disk)
        self.loaded(FOLDER, host_kv_bytes=TIER, disk_kv_bytes=TIER, disk_folder=folder, **more)
        self.send(self.grant(self.until(messages.NeedArena)))
        while not all(0 < info.host_pages == info.host_pages_pinned for info in self.report().models):
            pass

    def use(self, session: str) -> messages.SessionUse:
        return next(use for use in self.report().sessions if use.session == session)

    def use_when(self, session: str, state: str, *, on_device: bool) -> messages.SessionUse:
        """Waits until the session has this state, with all its pages on the device or all away from it."""
        while True:
            use = self.use(session)
            if (use.state, use.pages > 0, use.host_pages + use.disk_pages > 0) == (state, on_device, not on_device):
                return use

    def ran(self, session: str, prompt: list[int] = PROMPT) -> list[int]:
        tokens, reply = self.outcome(self.run(session, prompt, NEW))
        assert isinstance(reply, messages.Finished)
        return tokens

    def pause(self, session: str, tier: str = "host") -> messages.Pause:
        return messages.Pause(self.number(), session, tier)  # type: ignore[arg-type]

    def paused(self, session: str, tier: str = "host") -> messages.Paused:
        asked = self.pause(session, tier)
        self.send(asked)
        reply = self.until(messages.Paused)
        assert reply.request == asked.request
        return reply

    def refused(self, session: str, tier: str = "host") -> messages.Failed:
        asked = self.pause(session, tier)
        self.send(asked)
        reply = self.until(messages.Failed)
        assert reply.request == asked.request
        return reply


@contextmanager
def tiered(disk: Path | None = None) -> Iterator[Tiered]:
    """An engine with tiers and a session "s". At its end, the audit must find nothing."""
    with Tiered(max_batch_tokens=256) as engine:
        engine.load_with_tiers(disk)
        engine.open("s")
        yield engine
        engine.report()


def expected(prompt: list[int] = PROMPT) -> list[int]:
    return reference.greedy(FOLDER, prompt, NEW)
