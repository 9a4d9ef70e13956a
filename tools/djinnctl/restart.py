"""A restart, from the outside: the daemon is asked for it, drains, and is waited for until it serves again."""

from __future__ import annotations

import time

import msgspec

from djinn_client import Cancelled, Client, ConnectionLost, ShuttingDown, StatusReply

PAUSE = 0.1  # seconds between looks
PATIENCE = 15.0  # seconds without a listening daemon before an error: systemd may take some to start it again


class Restarted(msgspec.Struct):
    """`sessions`: how many can be attached to again. `models`: loaded again, from shared memory."""

    warm: bool
    version: str
    pid: int
    state: str
    sessions: int
    models: list[str]
    seconds: float


def restart(client: Client, *, warm: bool) -> Restarted:
    """Returns when the successor has an engine, or will get none. Raises ConnectionLost where no successor comes."""
    begun = time.monotonic()
    client.restart(warm=warm)
    after = _successor(client)
    return Restarted(
        warm=warm,
        version=after.version,
        pid=after.pid,
        state=after.state,
        sessions=sum(after.sessions.values()),
        models=[model.name for model in after.models if model.state in ("loading", "ready")],
        seconds=time.monotonic() - begun,
    )


def _successor(client: Client) -> StatusReply:
    silent = 0.0
    while True:
        try:
            reply = client.status()
        except (ShuttingDown, Cancelled):  # the question came while the daemon went; an older one says Cancelled
            silent = 0.0
        except ConnectionLost:  # the old daemon is gone, and the new one does not listen yet
            if silent > PATIENCE:
                raise
            silent += PAUSE
        else:
            if reply.state not in ("draining", "starting"):
                return reply
            silent = 0.0
        time.sleep(PAUSE)


def render(done: Restarted) -> str:
    """The result for people."""
    models = f"loads again {', '.join(done.models)}" if done.models else "has no models to load again"
    kept = f"{done.sessions} sessions are" if done.sessions != 1 else "1 session is"
    return (
        f"djinnd {done.version} (pid {done.pid}) is {done.state} after {done.seconds:.1f} s and {models}; {kept} there"
    )
