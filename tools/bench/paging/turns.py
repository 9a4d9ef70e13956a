"""A long session's turns: it leaves the device in each wait, comes back, and reads a tool's answer.

    python -m tools.bench.paging.turns CHECKPOINT [--tokens 100000] [--turns 10] [--new 64] [--memory 48GiB]

The pool has pages for one such session. Two of them take turns, so each finds its pages taken by the other, and has to
copy them from host memory. Before that, one session is paused to the host and resumed, beside the rates of the bus.

Tokens that are computed beyond the new ones were there before. At most a page of them is computed again: a session's
state, where a model has one, is kept at the end of each page.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.bus import measured_apart
from tools.bench.harness.command import Result, given, say
from tools.bench.harness.daemon import device_name
from tools.bench.harness.paged_model import PagedModel, daemon_of, loaded
from tools.bench.paging import kv_measures as measures


def measure(
    checkpoint: Path, device: str, memory: str, host_kv: str | None, tokens: int, turns: int, new: int
) -> dict[str, Any]:
    bus = measured_apart(device, "--both-ways")
    with daemon_of(checkpoint, bus.device, memory, given(host_kv=host_kv), None) as address:
        with loaded(address, tokens) as model:
            page = {"page_tokens": model.info.page_size, "page_bytes": model.info.page_bytes}
            kv_bytes = model.pool_bytes(model.tokens + (turns + 1) * (new + 1))
        with loaded(address, tokens, kv_bytes, ("host",)) as model:
            copying = model.session_pages * model.info.page_bytes / bus.up
            say(f"a session of {model.tokens:,} tokens leaves and comes back")
            down, up = measures.demote(model, copying), measures.promote(model, copying)
            say(f"{turns} turns of two sessions")
            taken = take_turns(model, turns, new)
        return {
            "device": device_name(address),
            "tokens": model.tokens,
            **page,
            "bus": {"up": bus.up, "down": bus.down},
            "session_bytes": up.nbytes,
            "demote": down._asdict() | {"rate": down.rate, "traced_rate": down.traced_rate},
            "promote": up._asdict() | {"rate": up.rate, "traced_rate": up.traced_rate},
            "turns": taken,
        }


def take_turns(model: PagedModel, turns: int, new: int) -> list[dict[str, Any]]:
    """→ for each turn the seconds until its token, and the tokens that it computed beyond the new ones."""
    found = []
    with model.session() as one:
        _wait_off(model, one, 0)
        with model.session() as other:
            _wait_off(model, other, 0)
            for number in range(2 * turns):
                session = (one, other)[number % 2]
                began = time.perf_counter()
                session.signal("COMPUTE")
                reply = session.generate(model.prompt(new), max_tokens=1, ignore_eos=True)
                again = reply.usage.computed_tokens - new - 1  # and the last turn's token, which had no KV
                found.append({"seconds": time.perf_counter() - began, "again": again})
                _wait_off(model, session, number + 1)
    return found


def _wait_off(model: PagedModel, session: djinn.Session, number: int) -> None:
    """Says that the session waits for a tool, and returns when it is off the device. Each wait has another tool, so
    that the daemon cannot learn the duration."""
    session.signal("IO_WAIT", tool=f"turn {number}")
    model.wait_until(session, lambda info: info.pages == 0)


def again(found: dict[str, Any]) -> int:
    """The most tokens that a turn computed again."""
    return max(int(turn["again"]) for turn in found["turns"])


def table(name: str, found: dict[str, Any]) -> Table:
    shown = Table("measure", "found", "of the bus", title=f"{name} on {found['device']}, {found['tokens']:,} tokens")
    for what in ("demote", "promote"):
        copied = found[what]
        told = f"{copied['nbytes'] / 1e9:.2f} GB in {copied['seconds'] * 1e3:.1f} ms"
        shown.add_row(what, f"{told}, its copies at {_rate(copied) / 1e9:.1f} GB/s", f"{_share(found, what):.2f}")
    times = [turn["seconds"] for turn in found["turns"]]
    shown.add_row("a turn", f"{statistics.median(times) * 1e3:.1f} ms, at most {max(times) * 1e3:.1f}", "")
    shown.add_row("computed again", f"at most {again(found)} tokens, a page has {found['page_tokens']}", "")
    return shown


def summary(found: dict[str, Any]) -> str:
    leaves, comes = _share(found, "demote"), _share(found, "promote")
    return (
        f"{found['tokens']:,} tokens, {found['session_bytes'] / 1e9:.2f} GB: copies leave at {leaves:.2f} of the bus "
        f"and come back at {comes:.2f}; a turn computes at most {again(found)} tokens again"
    )


def _share(found: dict[str, Any], what: str) -> float:
    """The rate of the copies as a share of the bus's."""
    return _rate(found[what]) / float(found["bus"]["down" if what == "demote" else "up"])


def _rate(copied: dict[str, Any]) -> float:
    """Bytes a second of the copies alone. A pause ends later, when the pages' checksums are known. A CPU's copies are
    not in the trace."""
    return float(copied["traced_rate"] or copied["rate"])


@command.bench("turns", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.host_kv
@click.option("--tokens", default=100_000, show_default=True, help="Tokens of each session's prompt.")
@click.option("--turns", default=10, show_default=True, help="Turns of each session.")
@click.option("--new", default=64, show_default=True, help="Tokens of a tool's answer.")
def main(checkpoint: Path, device: str, memory: str, host_kv: str | None, tokens: int, turns: int, new: int) -> Result:
    found = measure(checkpoint, device, memory, host_kv, tokens, turns, new)
    parameters = {"model": checkpoint.name, "memory": memory, "host_kv": host_kv, "tokens": tokens, "turns": turns}
    return Result(parameters | {"new": new}, found, summary(found), [table(checkpoint.name, found)])


if __name__ == "__main__":
    main()
