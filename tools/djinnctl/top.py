"""`djinnctl top`: the daemon and its sessions at a glance, the busiest first."""

from __future__ import annotations

import time

import msgspec

from djinn_client import Client, SessionInfo, StatusReply
from djinnctl import render
from djinnctl.layout import Group, Renderable
from djinnctl.units import count

BUSIEST = ("running", "held", "arriving", "queued", "idle", "stopped", "waiting", "paused", "detached")


class Glance(msgspec.Struct):
    status: StatusReply
    sessions: list[SessionInfo]
    tokens_per_s: float | None  # generated since the glance before; None: this is the first


class Reader:
    """Each call asks the daemon for a Glance, with the tokens since the call before."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before: tuple[float, int] | None = None  # when, and the tokens generated until then

    def __call__(self) -> Glance:
        status, sessions = self._client.status(), self._client.sessions()
        now, tokens = time.monotonic(), sum(device.generated_tokens for device in status.devices)
        tokens_per_s = None
        if self._before is not None:
            then, before = self._before
            tokens_per_s = max(0, tokens - before) / (now - then)  # a new engine begins with 0
        self._before = now, tokens
        return Glance(status, sorted(sessions, key=_order), tokens_per_s)


def show(glance: Glance) -> Renderable:
    status = glance.status
    parts = [*render.summary(status)]
    if glance.tokens_per_s is not None:
        parts.append(f"tokens/s: {count(round(glance.tokens_per_s))}")
    parts += ["", render.devices(status.devices)]
    if any(info.pages for info in status.models):
        parts += ["", render.pools(status.models)]
    return Group(*parts, "", render.sessions(glance.sessions))


def _order(info: SessionInfo) -> tuple[int, int]:
    place = BUSIEST.index(info.state) if info.state in BUSIEST else len(BUSIEST)
    return place, -render.held_bytes(info)
