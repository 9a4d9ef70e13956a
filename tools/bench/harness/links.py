"""Links to another machine: a rate, a round trip and a loss, and how this kernel can shape them."""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple

QUEUE = 100_000  # packets that wait in netem: more than 10 Gbit/s has on the way in 100 ms
RELAYED_MS = 1.0  # a relay waits for whole milliseconds
TBF = ("burst", "1mb", "latency", "50ms")


class Link(NamedTuple):
    gbit: float
    round_trip_ms: float
    loss_percent: float = 0.0


class Shaping(NamedTuple):
    """How a cable is made a link."""

    qdisc: list[str]  # arguments of `tc qdisc replace dev DEVICE root`, for both ends
    relay_s: float  # how long a relay before the gateway keeps each byte; 0: there is no relay
    means: str  # for the reader of the figures


def parse_link(text: str) -> Link:
    """`1gbit,20ms` or `1gbit,20ms,1%`. Raises ValueError."""
    found = re.fullmatch(r"([\d.]+)gbit,([\d.]+)ms(?:,([\d.]+)%)?", text)
    if found is None:
        raise ValueError(f"{text!r} is no link; write RATEgbit,ROUND_TRIPms or RATEgbit,ROUND_TRIPms,LOSS%")
    return Link(float(found[1]), float(found[2]), float(found[3] or 0))


def shaping(link: Link, *, netem: bool) -> Shaping | None:
    """None: this kernel cannot lose packets on purpose."""
    rate, each_way_ms = f"{link.gbit:g}gbit", link.round_trip_ms / 2
    if netem:
        loss = ["loss", f"{link.loss_percent:g}%"] if link.loss_percent else []
        qdisc = ["netem", "delay", f"{each_way_ms:g}ms", *loss, "rate", rate, "limit", str(QUEUE)]
        return Shaping(qdisc, 0.0, "netem")
    if link.loss_percent:
        return None
    qdisc = ["tbf", "rate", rate, *TBF]
    if each_way_ms < RELAYED_MS:
        return Shaping(qdisc, 0.0, "tbf; the delay is the cable's own, below 0.1 ms")
    return Shaping(qdisc, each_way_ms / 1e3, "tbf; a relay keeps each byte, so TCP's own acknowledgements are early")


def has_netem() -> bool:
    """Whether this kernel delays and loses packets. Needs the right to make a network namespace."""
    tried = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms", "loss", "1%"]
    return subprocess.run(tried, stderr=subprocess.DEVNULL).returncode == 0


def shape(there: list[str], device: str, qdisc: list[str]) -> None:
    """Replaces what the device does with its packets. `there` runs a command in the device's namespace."""
    subprocess.run([*there, "tc", "qdisc", "replace", "dev", device, "root", *qdisc], check=True)
