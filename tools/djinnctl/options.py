"""Options that several commands take, and how their values are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from djinn_client.protocol.fields.placing import MAX_SLOTS
from djinnctl.units import parse_resident, parse_seconds, parse_size, parse_speculation

F = TypeVar("F", bound=Callable[..., Any])

DAY_S = 86400.0


class Written(click.ParamType):  # type: ignore[type-arg]  # only new releases of click have an argument here
    """The type of an argument that is written in units or words. `parse` reads it, and raises ValueError."""

    def __init__(self, name: str, parse: Callable[[str], Any], *, not_zero: str = "") -> None:
        """`not_zero` says what 0 is. Without it 0 is a value like others. With it 0 is wrong usage, because the daemon
        would take it for the option's default."""
        self.name = name
        self._parse = parse
        self._not_zero = not_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            parsed = self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if parsed == 0 and self._not_zero:
            self.fail(f"{value!r} is {self._not_zero}; leave the option out for the default", param, ctx)
        return parsed


SIZE = Written("SIZE", parse_size)
SOME_SIZE = Written("SIZE", parse_size, not_zero="no memory at all")
TIME = Written("TIME", parse_seconds)
SOME_TIME = Written("TIME", parse_seconds, not_zero="no time at all")


def read_period(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Refuses nan, which click's ranges let through."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is no time; write seconds, as 0.5", ctx, param)
    return value


def read_packing(ctx: click.Context, param: click.Parameter, value: str | None) -> bool | None:
    return None if value is None else value == "auto"


watch_option = click.option(
    "--watch",
    metavar="[SECONDS]",
    type=click.FloatRange(min=0.1, max=DAY_S),
    callback=read_period,
    is_flag=False,
    flag_value=2.0,
    default=None,
    help="Show it again at this interval in seconds (2), until Ctrl-C.",
)


def kv_option(command: F) -> F:
    what = "Memory for KV pages, such as 4GiB. Default: as much as fits."
    return click.option("--kv", type=SOME_SIZE, help=what)(command)


def tier_options(command: F) -> F:
    """For pages that have left the device: the command gets `host_kv` and `disk_kv`, None for what is not given."""
    for name, what in (("disk", "Disk"), ("host", "Host memory")):
        told = f"{what} for KV pages that have left the device, such as 16GiB; 0B: none. Default: as configured."
        command = click.option(f"--{name}-kv", type=SIZE, help=told)(command)
    return command


def placing_options(command: F) -> F:
    """Where a model's blocks go: the command gets djinn_client's PlacingOptions, None for what is not given."""
    for option in (
        click.option(
            "--packing",
            type=click.Choice(["auto", "off"]),
            callback=read_packing,
            help="Whether bfloat16 blocks may be packed into the lossless 12-bit code.",
        ),
        click.option(
            "--quantise",
            type=click.Choice(["fp8", "int8"]),
            help="Quantise the matrices of a 16-bit checkpoint when it is loaded. Changes results.",
        ),
        click.option(
            "--kv-dtype",
            type=click.Choice(["auto", "fp8"]),
            help="Keep KV in a byte for each number, half of 16 bits. Changes results.",
        ),
        click.option(
            "--speculation",
            type=Written("speculation", parse_speculation),
            metavar="auto|off|draft=MODEL",
            help="Whether steps also run guesses of a session's next tokens, and a smaller model that guesses, too. "
            "Changes no token.",
        ),
        click.option("--slots", type=click.IntRange(0, MAX_SLOTS), metavar="N", help="Slots of the ring."),
        click.option(
            "--ring-gb", type=float, metavar="G", help="Memory for the ring, in 10^9 bytes, instead of --slots."
        ),
        click.option(
            "--resident",
            type=Written("blocks", parse_resident),
            metavar="auto|N|0.73",
            help="Blocks that stay on the device, or their share; the others stream. Default: as many as fit.",
        ),
    ):
        command = option(command)
    return command
