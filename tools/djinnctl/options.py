"""Options that several commands take, and how their values are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from djinn_client.protocol.fields.placing import MAX_SLOTS
from djinnctl.units import parse_resident, parse_seconds, parse_size

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

DAY_S = 86400.0


def read_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    return _read(parse_size, ctx, param, value)


def read_some_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """For an option that has a default: 0 bytes, which would mean that default to the daemon, are wrong usage."""
    size = read_size(ctx, param, value)
    if size == 0:
        raise click.BadParameter(f"{value!r} is no memory at all; leave the option out for the default", ctx, param)
    return size


def read_seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    return _read(parse_seconds, ctx, param, value)


def read_some_time(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """For an option that has a default: 0 seconds, which would mean that default to the daemon, are wrong usage."""
    seconds = read_seconds(ctx, param, value)
    if seconds == 0:
        raise click.BadParameter(f"{value!r} is no time at all; leave the option out for the default", ctx, param)
    return seconds


def read_resident(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | float | Literal["auto"] | None:
    return _read(parse_resident, ctx, param, value)


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
    return click.option("--kv", callback=read_some_size, metavar="SIZE", help=what)(command)


def tier_options(command: F) -> F:
    """For pages that have left the device: the command gets `host_kv` and `disk_kv`, None for what is not given."""
    for name, what in (("disk", "Disk"), ("host", "Host memory")):
        told = f"{what} for KV pages that have left the device, such as 16GiB; 0B: none. Default: as configured."
        command = click.option(f"--{name}-kv", callback=read_size, metavar="SIZE", help=told)(command)
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
        click.option("--slots", type=click.IntRange(0, MAX_SLOTS), metavar="N", help="Slots of the ring."),
        click.option(
            "--ring-gb", type=float, metavar="G", help="Memory for the ring, in 10^9 bytes, instead of --slots."
        ),
        click.option(
            "--resident",
            callback=read_resident,
            metavar="auto|N|0.73",
            help="Blocks that stay on the device, or their share; the others stream. Default: as many as fit.",
        ),
    ):
        command = option(command)
    return command


def _read(parse: Callable[[str], T], ctx: click.Context, param: click.Parameter, value: str | None) -> T | None:
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error
