"""Sessions over links of several rates, round trips and losses, between two network namespaces of this machine.

    python -m tools.bench.serving.remote_links [--link 1gbit,20ms]… [--rounds 3]

Each way is measured by a client process of its own: over the Unix socket, over TLS on loopback, and over a cable that
`tc` shapes. With netem, the kernel makes rate, delay and loss. Without it, tbf makes the rate, a relay a delay of
milliseconds, and a link that loses packets is not measured. The result says of each link how it was made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from tools import two_machines
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name, private_daemon
from tools.bench.harness.links import has_netem, parse_link, shape, shaping
from tools.bench.harness.remote import Door, remote_gateway, slow_link
from tools.bench.serving.http import MODEL
from tools.two_machines import CLIENT_END, SERVER, SERVER_END, Client, NamespacesRefused

LINKS = ("10gbit,0.2ms", "1gbit,0.2ms", "1gbit,20ms", "1gbit,100ms", "1gbit,20ms,1%")
ANY = "0.0.0.0"


def measure(device: str, memory: str, links: tuple[str, ...], sizes: list[str]) -> dict[str, Any]:
    """The ways' figures by their names. A way that cannot be made here has `not_measured`, the reason."""
    with (
        two_machines.client_machine() if two_machines.entered() else nullcontext() as client,
        tempfile.TemporaryDirectory(prefix="djinnd-", dir="/tmp") as name,
        private_daemon({"device": device, "memory": memory}, Path(name)) as local,
        remote_gateway(Path(name), local, ANY) as door,
    ):
        here = {"local": local, "loopback": door.address()}
        ways = {way: _figures(way, [], address, sizes) for way, address in here.items()}
        if client is None:
            ways |= {link: {"not_measured": "network namespaces cannot be used here"} for link in links}
        else:
            netem = has_netem()
            ways |= {link: _over(link, door, client, sizes, netem=netem) for link in links}
        return {"device": device_name(local), "ways": ways}


def _over(name: str, door: Door, client: Client, sizes: list[str], *, netem: bool) -> dict[str, Any]:
    shaped = shaping(parse_link(name), netem=netem)
    if shaped is None:
        return {"not_measured": "this kernel has no netem, which loses packets"}
    shape([], SERVER_END, shaped.qdisc)
    shape(client.command(), CLIENT_END, shaped.qdisc)
    with slow_link(door.port, shaped.relay_s, SERVER) if shaped.relay_s else nullcontext(door.port) as port:
        found = _figures(name, client.command(), door.address(port, SERVER), sizes)
    return {**found, "made_by": shaped.means}


def _figures(way: str, there: list[str], address: str, sizes: list[str]) -> dict[str, Any]:
    """Runs the client's part and returns its figures. `there` runs a command in a network namespace."""
    say(way)
    part = [*there, sys.executable, "-m", "tools.bench.serving.remote_client", address, *sizes]
    figures: dict[str, Any] = json.loads(subprocess.run(part, check=True, stdout=subprocess.PIPE).stdout)
    return figures


def table(found: dict[str, Any]) -> Table:
    shown = Table("", "call", "first token", "tokens/s", "stop", "logits", "on the wire", "capture", "share_model")
    shown.title = f"{MODEL} and a large model on {found['device']}; milliseconds, seconds, and MB"
    for way, figures in found["ways"].items():
        shown.add_row(way, *([figures["not_measured"]] if "not_measured" in figures else _cells(figures)))
    return shown


def _cells(figures: dict[str, Any]) -> list[str]:
    milliseconds = {name: f"{figures[name] * 1e3:.1f}" for name in ("call_s", "first_token_s", "breakpoint_s")}
    return [
        milliseconds["call_s"],
        milliseconds["first_token_s"],
        f"{figures['tokens_per_s']:.0f}",
        milliseconds["breakpoint_s"],
        f"{figures['logits_s'] * 1e3:.0f}, {figures['logits_bytes'] / 1e6:.1f} MB",
        f"{figures['wire_bytes'] / 1e6:.2f} MB" if figures["wire_bytes"] else "",
        f"{figures['capture_s']:.2f} s, {figures['capture_bytes'] / 1e6:.0f} MB",
        f"{figures['share_s']:.1f} s, {figures['share_bytes'] / 1e6:.0f} MB",
    ]


def summary(found: dict[str, Any]) -> str:
    """A part for each way."""
    return "; ".join(f"{way}: {_told(figures)}" for way, figures in found["ways"].items())


def _told(figures: dict[str, Any]) -> str:
    if "not_measured" in figures:
        return f"not measured: {figures['not_measured']}"
    return (
        f"a stop {figures['breakpoint_s'] * 1e3:.0f} ms, {figures['tokens_per_s']:.0f} tokens/s, a capture of "
        f"{figures['capture_bytes'] / 1e6:.0f} MB {figures['capture_s']:.2f} s, share_model of "
        f"{figures['share_bytes'] / 1e6:.0f} MB {figures['share_s']:.1f} s"
    )


def _checked(context: click.Context, option: click.Parameter, links: tuple[str, ...]) -> tuple[str, ...]:
    try:
        for link in links:
            parse_link(link)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return links


@command.bench("remote_links", __doc__, width=140)
@command.device
@click.option("--memory", default="4GiB", show_default=True, help="Budget of the daemon.")
@click.option("--link", "links", multiple=True, default=LINKS, show_default=True, callback=_checked)
@click.option("--tokens", default=2048, show_default=True, help="Tokens of the capture.")
@click.option("--vocabulary", default=112_000, show_default=True, help="Of the shared model: 1 GB of weights.")
@command.rounds(3)
def main(device: str, memory: str, links: tuple[str, ...], tokens: int, vocabulary: int, rounds: int) -> Result:
    if not two_machines.entered():
        try:
            two_machines.enter("-m", "tools.bench.serving.remote_links", *sys.argv[1:])
        except NamespacesRefused as refused:
            say(str(refused))  # the ways without a cable are measured
    found = measure(device, memory, links, [str(rounds), str(tokens), str(vocabulary)])
    return Result({"tokens": tokens, "vocabulary": vocabulary, "rounds": rounds}, found, summary(found), [table(found)])


if __name__ == "__main__":
    main()
