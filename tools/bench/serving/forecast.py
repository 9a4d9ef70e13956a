"""Compares the forecast of `djinnctl plan` for a model in a budget with measurements.

    python -m tools.bench.serving.forecast CHECKPOINT --place 22GiB,kv=1GiB --place 24GiB,resident=29 [--record]

One daemon is used, and its budget changes from place to place. First token: a prompt of 512 tokens in a fresh session
of a quiet daemon. Step: several sessions that decode at once, with a context of 512 tokens each, or less if the pages
on the device are fewer. The bus is measured before that in its own process, and the device's memory by NVML.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.bus import measured_apart
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name
from tools.bench.harness.paged_model import MODEL, QUIET_S, daemon_of
from tools.bench.serving.decode import FIRST_TOKEN_RUNS, decode_s, first_token_s
from tools.bench.stream.experiment import size
from tools.bench.stream.memory import DeviceMemory, nvml_meter

ROUNDS = 3  # of decoding; the best counts
PAUSE_S = 0.2  # before a first token, so that a ring fills and the daemon is quiet


class Place(click.ParamType[dict[str, Any]]):
    """Reads MEMORY[,kv=BYTES][,resident=N][,packing=off] as keyword arguments of `plan`."""

    name = "PLACE"

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, Any]:
        try:
            memory, *options = str(value).split(",")
            found: dict[str, Any] = {"memory_bytes": size(memory)}
            for key, text in (option.split("=") for option in options):
                if key == "kv":
                    found["kv_bytes"] = size(text)
                elif key == "packing":
                    found["packing"] = {"on": True, "off": False}[text]
                elif key == "resident":
                    found["resident"] = float(text) if "." in text else int(text)
                else:
                    raise ValueError(key)
        except (ValueError, KeyError, djinn.DjinnError):
            self.fail(f"{value!r} is not as in 24GiB,kv=1GiB,resident=29,packing=off", param, ctx)
        return found


class Figure(NamedTuple):
    foretold: float  # seconds
    found: float

    @property
    def off(self) -> float:
        """Relative error of the forecast."""
        return self.foretold / self.found - 1


def measure(address: str, place: dict[str, Any], tokens: int) -> dict[str, Any]:
    memory, options = place["memory_bytes"], {k: v for k, v in place.items() if k != "memory_bytes"}
    with djinn.Client(address) as client:
        client.set_budget(memory)
        plan = client.plan(MODEL, memory_bytes=memory, **options)
        with DeviceMemory(nvml_meter()) as device, device.watch("all") as used:
            info = client.load(MODEL, **options)
            times = {"first token": Figure(plan.first_token_s, _first_token(address, plan.first_token_tokens, info))}
            contexts = {}
            for sessions, foretold in sorted(plan.step_s.items()):
                contexts[sessions] = context = _context(info, sessions, plan.first_token_tokens, tokens)
                work = (address, MODEL, sessions, context, tokens, info.vocab)
                found = min(asyncio.run(decode_s(*work)) for _ in range(ROUNDS))
                times[f"step of {sessions}"] = Figure(foretold, found)
        client.unload(MODEL)
    return {
        "blocks": {"plain": info.blocks_plain, "packed": info.blocks_packed, "streamed": info.blocks_streamed},
        "streamed_bytes": info.streamed_bytes,
        "contexts": contexts,
        "seconds": {name: {**figure._asdict(), "off": figure.off} for name, figure in times.items()},
        "peak_bytes": used.peak,
    }


def _first_token(address: str, tokens: int, info: djinn.ModelInfo) -> float:
    first_token_s(address, MODEL, tokens, info.vocab)
    time.sleep(QUIET_S)  # graphs of these steps are captured meanwhile
    return statistics.median(first_token_s(address, MODEL, tokens, info.vocab, PAUSE_S, seed=FIRST_TOKEN_RUNS + 1))


def _context(info: djinn.ModelInfo, sessions: int, most: int, tokens: int) -> int:
    room = (info.pages - 1) // sessions * info.page_size - tokens
    return max(16, min(most, room))


def _name(place: dict[str, Any]) -> str:
    words = [f"{place['memory_bytes'] / 2**30:g} GiB"]
    words += [f"{place['resident']} resident"] if "resident" in place else []
    words += ["packing off"] if not place.get("packing", True) else []
    return ", ".join(words)


def _rate(found: dict[str, Any]) -> float:
    """Bytes a second that the bus carries while one session decodes."""
    return float(found["streamed_bytes"] / found["seconds"]["step of 1"]["found"])


def table(title: str, places: dict[str, dict[str, Any]], bus: float) -> Table:
    columns = ("blocks", "", "foretold", "found", "off", "of the bus")
    shown = Table("place", *columns, title=title, caption=f"milliseconds; the bus carries {bus / 1e9:.1f} GB/s")
    for place, found in places.items():
        blocks = ", ".join(f"{count} {where}" for where, count in found["blocks"].items() if count)
        for index, (name, of) in enumerate(found["seconds"].items()):
            rate = f"{_rate(found) / bus:.1%}" if found["streamed_bytes"] and name == "step of 1" else ""
            times = (f"{of['foretold'] * 1e3:.2f}", f"{of['found'] * 1e3:.2f}", f"{of['off']:+.1%}")
            shown.add_row(*((place, blocks) if index == 0 else ("", "")), name, *times, rate)
    return shown


def summary(places: dict[str, dict[str, Any]], bus: float) -> str:
    said = []
    for place, found in places.items():
        figures = ", ".join(
            f"{name} {of['found'] * 1e3:.2f} ms (foretold {of['foretold'] * 1e3:.2f}, {of['off']:+.0%})"
            for name, of in found["seconds"].items()
        )
        rate = f", {_rate(found) / 1e9:.1f} GB/s" if found["streamed_bytes"] else ""
        peak = f", at most {found['peak_bytes'] / 2**30:.1f} GiB in use" if found["peak_bytes"] else ""
        said.append(f"{place}: {figures}{rate}{peak}")
    return f"bus {bus / 1e9:.1f} GB/s; " + "; ".join(said)


@command.bench("forecast", __doc__)
@command.checkpoint
@command.device
@click.option("--place", "places", type=Place(), multiple=True, required=True, help=Place.__doc__)
@click.option("--tokens", default=33, show_default=True, help="Tokens that a session generates.")
def main(checkpoint: Path, device: str, places: tuple[dict[str, Any], ...], tokens: int) -> Result:
    bus = measured_apart(device)
    found: dict[str, dict[str, Any]] = {}
    most = str(max(place["memory_bytes"] for place in places))
    # Without a host tier: steps are slower while its memory is pinned, in the first seconds after a load.
    with daemon_of(checkpoint, bus.device, most, {"host_kv": 0, "disk_kv": 0}, None) as address:
        for place in places:
            found[_name(place)] = measure(address, place, tokens)
            say(f"{_name(place)}: {found[_name(place)]}")
        on = device_name(address)
    results = {"device": on, "bus_bytes_per_s": bus.up, "places": found}
    parameters = {"model": checkpoint.name, "places": list(places), "tokens": tokens}
    shown = table(f"{checkpoint.name} on {on}", found, bus.up)
    return Result(parameters, results, summary(found, bus.up), [shown])


if __name__ == "__main__":
    main()
