"""A load: groups of sessions of some class and tenant, with the calls that they make.

A load is drawn before anything runs, so that a daemon and the simulator get the same one.

A session of a group opens, makes its calls with pauses between them, and closes. Without a rate, `sessions` of them are
alive at once, and each is followed by another one. With a rate, `sessions` come in all, as a Poisson process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import msgspec
import yaml

from djinn_client.protocol.fields.scheduling import Class

Tells = Literal["none", "signals", "tool", "expected"]
Tokens = tuple[int, int]  # the least and the most tokens


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sessions of one kind.

    `tells`: signals at a pause ("none"; "signals"; "tool", with the tool's name; "expected", with the duration).
    `forgets`: the session forgets all tokens after each answer, so that KV is never short.
    """

    priority: Class = msgspec.field(name="class")
    sessions: int
    rate: float = 0.0  # arrivals a second
    tenants: tuple[int, ...] = (0,)  # the tenants of its sessions, in turns
    context: Tokens  # tokens of the first call's prompt
    prompt: Tokens = (0, 0)  # tokens of the other calls' prompts
    answer: Tokens
    calls: int = 1
    pause_s: tuple[float, float] = (0.0, 0.0)  # between an answer and the next call, and between two sessions
    tells: Tells = "none"
    forgets: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    groups: dict[str, Group]
    seconds: float  # calls begin in this time only
    weights: dict[int, float] = {}  # by tenant
    seed: int = 0

    @property
    def tenants(self) -> list[int]:
        return sorted({tenant for group in self.groups.values() for tenant in group.tenants})


class Call(NamedTuple):
    pause_s: float  # before the call
    tokens: int
    answer: int


class Visit(NamedTuple):
    """The life of one session."""

    group: str
    number: int  # unique within the load
    tenant: int
    arrives_s: float
    rest_s: float  # after the session before this one
    calls: tuple[Call, ...]


def visits(load: Load) -> Iterator[Iterator[Visit]]:
    """Draws the load; the same load gives the same visits. Each inner iterator has sessions that follow one another,
    and the first of them has its `arrives_s`."""
    numbers = count()
    for name, group in load.groups.items():
        source = random.Random(f"{load.seed} {name}")
        now = 0.0
        for slot in range(group.sessions):
            now += source.expovariate(group.rate) if group.rate else 0.0
            yield _sessions(load, name, slot, now, numbers)


def _sessions(load: Load, name: str, slot: int, arrives_s: float, numbers: Iterator[int]) -> Iterator[Visit]:
    group = load.groups[name]
    source = random.Random(f"{load.seed} {name} {slot}")
    tenant = group.tenants[slot % len(group.tenants)]
    while True:
        calls = [Call(0.0, source.randint(*group.context), source.randint(*group.answer))]
        calls += [
            Call(source.uniform(*group.pause_s), source.randint(*group.prompt), source.randint(*group.answer))
            for _ in range(group.calls - 1)
        ]
        yield Visit(name, next(numbers), tenant, arrives_s, source.uniform(*group.pause_s), tuple(calls))
        if group.rate:
            return


def read(path: Path) -> Load:
    """Reads a load from YAML. Raises BadParameter."""
    try:
        found: Any = yaml.safe_load(path.read_text())
        return msgspec.convert(found, Load, strict=False)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise click.BadParameter(f"{path}: {error}") from error
