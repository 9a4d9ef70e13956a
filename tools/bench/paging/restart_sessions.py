"""A restart of the daemon with many sessions alive: how soon they continue, with which KV, and with equal tokens.

    python -m tools.bench.paging.restart_sessions CHECKPOINT [--sessions 50] [--context 2048] [--new 8] [--memory 80GiB]

Each session gets a prompt, and a fork of it generates the expected tokens. Sessions are called one after another, so
that every step has one row and each token must be the same. Recomputed KV is an exception: a step of many rows rounds
differently in the last bits. Then comes `djinnctl restart --warm`. The client attaches to all sessions and calls them
in the order of their beginning, which is the worst order if they do not all fit the device. Times count from the
command and include the old daemon's end; the new daemon's own part is its uptime.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.command import Result, given, say
from tools.bench.harness.daemon import device_name
from tools.bench.harness.paged_model import MODEL, PagedModel, daemon_of, loaded

LIMIT_S = 120.0  # until the new daemon answers


class Work(NamedTuple):
    sessions: int
    context: int  # tokens of each prompt
    new: int  # tokens that each session generates afterwards


class Left(NamedTuple):
    """A detached session."""

    id: str
    tokens: list[int]  # tokens that it is expected to generate


class Clock:
    """Times since the command and since the new daemon's start."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._began = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.uptime_s: dict[str, float] = {}

    def await_successor(self) -> None:
        """Waits until the new daemon answers. The old one answers until it ends."""
        while (elapsed := time.perf_counter() - self._began) < LIMIT_S:
            with suppress(djinn.ConnectionLost, djinn.ShuttingDown):
                if djinn.status(address=self._address).uptime_s < elapsed:
                    return
            time.sleep(0.02)
        raise click.ClickException(f"no other daemon {LIMIT_S:.0f} s after the command")

    def note(self, what: str) -> None:
        self.seconds[what] = time.perf_counter() - self._began
        self.uptime_s[what] = djinn.status(address=self._address).uptime_s


def measure(checkpoint: Path, device: str, memory: str, model: dict[str, str], work: Work) -> dict[str, Any]:
    settings = model | {"disk_kv": "0"}  # all KV must be found in host memory
    with (
        daemon_of(checkpoint, device, memory, settings, None) as address,
        loaded(address, work.context, tiers=["host"]) as served,
    ):
        info = served.now()
        say(f"{work.sessions} sessions; {info.pages:,} pages on the device, {info.host_pages:,} on the host")
        left = [leave(served, work) for _ in range(work.sessions)]
        figures = {name: getattr(info, name) for name in ("pages", "host_pages", "page_bytes", "page_size")}
        on = device_name(address)
        say("restarts")
        return {"device": on, **figures, **restarted(address, left, work)}


def leave(model: PagedModel, work: Work) -> Left:
    session = djinn.Session(MODEL, address=model.address)
    session.generate(model.prompt(work.context), max_tokens=1, ignore_eos=True)
    with session.fork() as fork:
        tokens = fork.generate(max_tokens=work.new, ignore_eos=True).token_ids
    session.detach()
    return Left(session.id, tokens)


def restarted(address: str, left: Sequence[Left], work: Work) -> dict[str, Any]:
    with djinn.Client(address) as client:
        clock = Clock(address)
        client.restart(warm=True)
    clock.await_successor()
    sessions = [djinn.Session.attach(one.id, address=address) for one in left]
    clock.note("all attached")
    replies = []
    for session in sessions:
        replies.append(session.generate(max_tokens=work.new, ignore_eos=True))
        if len(replies) == 1:
            clock.note("the first went on")
    clock.note("all went on")
    for session in sessions:
        session.close()
    computed = [reply.usage.computed_tokens for reply in replies]  # before the first new one: the last has no KV yet
    return {
        "seconds": clock.seconds,
        "uptime_s": clock.uptime_s,
        "sessions": len(sessions),
        "session_tokens": work.context + 1 + work.new,
        "computed": computed,
        "kept": sum(tokens == 1 for tokens in computed),
        "same_tokens": sum(reply.token_ids == one.tokens for reply, one in zip(replies, left, strict=True)),
    }


def summary(found: dict[str, Any]) -> str:
    times = ", ".join(
        f"{what} {seconds:.2f} s (uptime {found['uptime_s'][what]:.2f} s)" for what, seconds in found["seconds"].items()
    )
    kv = found["sessions"] * -(-found["session_tokens"] // found["page_size"]) * found["page_bytes"]
    return (
        f"{found['sessions']} sessions, {kv / 1e9:.1f} GB of KV: {times}; {found['kept']} with all their KV, "
        f"{found['same_tokens']} with the tokens as if never stopped"
    )


@command.bench("restart_sessions", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.kv
@command.host_kv
@click.option("--sessions", default=50, show_default=True)
@click.option("--context", default=2048, show_default=True, help="Tokens of each prompt.")
@click.option("--new", default=8, show_default=True, help="Tokens that each session generates afterwards.")
def main(checkpoint: Path, device: str, memory: str, kv: str | None, host_kv: str | None, **work: int) -> Result:
    model = given(kv=kv, host_kv=host_kv)
    found = measure(checkpoint, device, memory, model, Work(**work))
    table = Table("since the command", "seconds", "the daemon's uptime then", title=checkpoint.name)
    for what, seconds in found["seconds"].items():
        table.add_row(what, f"{seconds:.2f}", f"{found['uptime_s'][what]:.2f}")
    table.caption = summary(found)
    parameters = {"model": checkpoint.name, "memory": memory, **model, **work}
    return Result(parameters, found, summary(found), [table])


if __name__ == "__main__":
    main()
